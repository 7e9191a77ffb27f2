"""A run whose numbers outgrow the range of FP8 says so, and a sound one does not.

Reference: the limits of e4m3, and weights that are set to lie beyond them. All of it on a CPU, which emulates FP8."""
import json

import pytest
import torch
from conftest import arguments

import train_gpt as t
from nanogpt.precision import fp8_static, guard
from nanogpt.precision.fp8_static import STATIC


def defects(folder):
    text = next(folder.glob("*.txt")).read_text()
    return [json.loads(line.partition(" ")[2])["what"] for line in text.splitlines() if line.startswith("defect {")]


def run(corpus, folder):
    keys = dict(data_dir=corpus, precision="fp8-qkv", log_dir=folder, head_dim=16, ngram_rows=512)
    assert t.main(arguments(**keys)) == 0
    return defects(folder)


def test_a_sound_run_of_fp8_has_no_defect(corpus, tmp_path):
    assert run(corpus, tmp_path) == []


def test_a_run_whose_weights_do_not_fit_their_scale_names_the_projection(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_static, "WEIGHT_SCALE", 2.0**-14)  # weights beyond 448 / 2^14 = 0.027 are clamped
    monkeypatch.setattr(STATIC["qkv"], "weight_scale", 2.0**-14)
    found = run(corpus, tmp_path)
    assert any("% of the weights of qkv are too large for FP8 at step 4" in what for what in found)
    assert not any("weights of up" in what for what in found)  # whose limit was not lowered for the count


@pytest.mark.parametrize("operand", ["weights of qkv", "input of down", "weights of lm_head"])
def test_numbers_beyond_the_range_are_counted_and_change_the_loss(operand):
    c = t.parse_config(arguments(precision="fp8-qkv", seq_len=256))
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    with torch.no_grad():
        model.mlp.normal_(std=0.1)
        model.lm_head.normal_(std=1.0)  # a head that tells streams apart
        if operand == "weights of qkv":
            model.qkvo[:3] = torch.randn_like(model.qkvo[:3]) * 40
        elif operand == "input of down":
            model.mlp[0::2] *= 400  # of the MLPs' first products: their squares go beyond 448 * 64
        else:
            model.lm_head.normal_(std=20)
    tokens = torch.randint(0, 60, (1, 257), generator=torch.Generator().manual_seed(1)).short()
    difference, clamped = guard.compare_products(t, model, tokens, 0)
    assert clamped[operand] > guard.LARGEST_CLAMPED_PART
    assert abs(difference) > guard.LARGEST_DIFFERENCE
