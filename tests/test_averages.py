"""The averages of the last weights.

Reference: the average written out in float64, over the weights of every fourth step."""
import pytest
import torch
from conftest import optimizer_of, read, untrained

import train_gpt as t


@pytest.mark.parametrize("num_steps, steps, every, amount", [
    (32, 8, 4, 0.5),  # over the last quarter of the steps
    (3, 3, 3, 1.0),  # fewer than four steps: the average does not go back to the initial weights
])
def test_the_last_weights_go_half_of_the_way_to_their_averages_but_not_those_of_tables(
        num_steps, steps, every, amount):
    model = untrained(num_steps=num_steps, average_frac=0.25, dtype="float64")
    optimizer = optimizer_of(model)
    expected = {name: w.detach().clone() for name, w in model.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens = torch.randint(0, 60, (1025,), generator=draw)
        t.train_step(model, optimizer, read(model, [(tokens[:-1], tokens[1:])]), step)
        for name, w in model.named_parameters():
            if step % every == every - 1:
                expected[name] = (1 - amount) * expected[name] + amount * w.detach()
    tables = {name: model.get_parameter(name).detach().clone() for name in optimizer.tables.tables}
    for name, w in model.named_parameters():
        expected[name] = 0.5 * expected[name] + 0.5 * w.detach()
    optimizer.go_half_way_to_averages()
    for name, w in model.named_parameters():
        torch.testing.assert_close(w.detach(), tables.get(name, expected[name]), rtol=1e-12, atol=1e-15)
    assert tables and torch.equal(tables["ngrams"], expected["ngrams"]) == (amount == 1.0)
