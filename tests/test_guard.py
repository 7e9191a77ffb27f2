"""A run whose weights outgrow the range of FP8 says so, and a sound one does not.

Reference: the limits of e4m3, and weights that are set to lie beyond them. All of it on a CPU, which emulates FP8."""
import json

import pytest
import torch
from conftest import arguments

import train_gpt as t
from nanogpt.precision.fp8_static import LARGEST_CLAMPED_PART, STATIC, clamped_parts


def defects(corpus, folder):
    keys = dict(data_dir=corpus, precision="fp8-qkv", log_dir=folder, head_dim=16, ngram_rows=512)
    assert t.main(arguments(**keys)) == 0
    text = next(folder.glob("*.txt")).read_text()
    return [json.loads(line.partition(" ")[2])["what"] for line in text.splitlines() if line.startswith("defect {")]


def test_a_sound_run_of_fp8_has_no_defect_and_one_whose_weights_do_not_fit_names_the_projection(corpus, tmp_path, monkeypatch):
    assert defects(corpus, tmp_path / "sound") == []
    monkeypatch.setattr(STATIC["qkv"], "weight_scale", 2.0**-14)  # weights beyond 448 / 2^14 = 0.027 are clamped
    found = defects(corpus, tmp_path / "other")
    assert len(found) >= 2 and any("% of the weights of qkv are too large for FP8 at step" in what for what in found)
    assert not any("weights of up" in what for what in found)


@pytest.mark.parametrize("projection", ["qkv", "up", "down", "lm_head"])
def test_weights_beyond_the_range_are_counted_with_the_factor_that_multiplies_them(projection):
    model = t.GPT(t.parse_config(arguments(precision="fp8-qkv")), torch.device("cpu"))
    t.initialize(model, 0)
    with torch.no_grad():
        if projection == "qkv":
            model.qkvo[2] = 8.0
        elif projection == "up":
            model.mlp[0] = -8.0
        elif projection == "down":
            model.mlp[1] = 0.5
            model.scalars[0, [*t.SCALARS].index("down")] = 15.0
        else:
            model.lm_head[:2] = 7.0
        model.qkvo[3] = 100.0  # of "o", which is in bf16
    parts = clamped_parts(model, t.SCALARS)
    assert {name for name, part in parts.items() if part > LARGEST_CLAMPED_PART} == {projection}
