"""The averages of the last weights.

Reference: the average written out in float64, over the weights of every fourth step."""
import torch
from conftest import optimizer_of, read, untrained

import train_gpt as t


def test_a_run_of_fewer_than_four_steps_does_not_go_back_to_its_initial_weights():
    model = untrained(num_steps=3, average_frac=0.25)
    optimizer = optimizer_of(model)
    for step in range(3):
        tokens = torch.randint(0, 60, (1025,))
        t.train_step(model, optimizer, read(model, [(tokens[:-1], tokens[1:])]), step)
    last = model.mlp.detach().clone()
    optimizer.go_half_way_to_averages()
    assert torch.equal(model.mlp, last)


def test_the_last_weights_go_half_of_the_way_to_their_averages_but_not_those_of_tables():
    model = untrained(num_steps=32, average_frac=0.25, dtype="float64")  # over 8 steps
    optimizer = optimizer_of(model)
    expected = {name: w.detach().clone() for name, w in model.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    for step in range(8):
        tokens = torch.randint(0, 60, (1025,), generator=draw)
        t.train_step(model, optimizer, read(model, [(tokens[:-1], tokens[1:])]), step)
        for name, w in model.named_parameters():
            if step % 4 == 3:
                expected[name] = 0.5 * expected[name] + 0.5 * w.detach()
    tables = {name: model.get_parameter(name).detach().clone() for name in optimizer.tables.tables}
    for name, w in model.named_parameters():
        expected[name] = 0.5 * expected[name] + 0.5 * w.detach()
    optimizer.go_half_way_to_averages()
    for name, w in model.named_parameters():
        torch.testing.assert_close(w.detach(), tables.get(name, expected[name]), rtol=1e-12, atol=1e-15)
    assert tables and not torch.equal(tables["ngrams"], expected["ngrams"])
