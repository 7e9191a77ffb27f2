"""The small CPU recipe that nanoGPT documents, written anew: a plain GPT-2 on the laptop's byte shards, for comparison.

    python baseline.py [--data=data/pydocs] [--dtype=float32|bfloat16] [--iters=2000] [--seed=0] [--every=250]
"""
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCAB, VAL_TOKENS = 4, 4, 128, 64, 12, 257, 131_072
o = dict(data="data/pydocs", dtype="float32", iters="2000", seed="0", every="250")
o |= dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
iters, bf16 = int(o["iters"]), o["dtype"] == "bfloat16"


def tokens(split):
    (path,) = Path(o["data"]).glob(f"*_{split}_*.bin")
    return torch.from_numpy(np.minimum(np.fromfile(path, "<u2", offset=1024), VOCAB - 1).astype(np.int64))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.ln = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * LAYERS) ** -0.5 if "out" in name or "down" in name else 1
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, x):
        x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.wte.weight)


def loss_of(model, x, y, skip=0):
    """Mean loss over the positions from `skip` on."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        z = model(x)[:, skip:]
    return F.cross_entropy(z.flatten(0, 1).float(), y[:, skip:].flatten())


@torch.no_grad()
def validate(model, val, stride):
    """Windows of CONTEXT every `stride` tokens; each scores its last `stride` positions, so the context is longer."""
    x = val[:VAL_TOKENS].unfold(0, CONTEXT, stride)
    y = val[1 : VAL_TOKENS + 1].unfold(0, CONTEXT, stride)
    pieces = list(zip(x.split(512), y.split(512)))
    return sum(loss_of(model, a, b, CONTEXT - stride).item() * len(a) for a, b in pieces) / len(x)


torch.manual_seed(int(o["seed"]))
train, val, model = tokens("train"), tokens("val"), Model()
decayed = [p for p in model.parameters() if p.dim() == 2]
optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1),
                               dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0)],
                              lr=1e-3, betas=(0.9, 0.99), fused=True)  # fmt: skip
seconds, begin = 0.0, time.perf_counter()
for step in range(iters + 1):
    if step % int(o["every"]) == 0 or step == iters:
        seconds += time.perf_counter() - begin
        more = f" sliding:{validate(model, val, 16):.4f}" if step == iters else ""
        loss = validate(model, val, CONTEXT)
        print(f"step:{step}/{iters} val_loss:{loss:.4f}{more} seconds:{seconds:.1f}", flush=True)
        begin = time.perf_counter()
    lr = 1e-3 * (step + 1) / 100 if step < 100 else \
        1e-4 + 0.45e-3 * (1 + np.cos(np.pi * (step - 100) / (iters - 100)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    i = torch.randint(len(train) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
    loss = loss_of(model, train[i[:, :-1]], train[i[:, 1:]])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
