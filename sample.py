"""Continue a text with a trained model.

    python sample.py model.pt "The function returns"

model.pt is what `train_gpt.py --save_checkpoint=model.pt` has written.
"""
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from data.prepare import byte_to_token, token_to_byte
from data.shards import SEPARATOR
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import BadInput, require


def codec(vocab_size: int):
    """Two functions, from a text to its tokens and back: bytes for a small vocabulary, otherwise
    GPT-2's byte-pair encoding. Tokens that begin a document or pad the vocabulary have no text."""
    if vocab_size <= SEPARATOR:
        def encode(text: str) -> list[int]:
            return byte_to_token[list(text.encode())].tolist()

        def decode(tokens: list[int]) -> str:
            known = [token for token in tokens if token < len(token_to_byte)]
            return bytes(token_to_byte[known]).decode(errors="replace")

        return encode, decode

    import tiktoken
    gpt2 = tiktoken.get_encoding("gpt2")
    return gpt2.encode_ordinary, lambda tokens: gpt2.decode([t for t in tokens if t < SEPARATOR])


def next_token(logits: Tensor, temperature: float) -> int:
    """A token drawn by its probability, from logits (V,)."""
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1))


@torch.no_grad()
def continue_text(model, view, text: str, count: int, temperature: float = 0.7) -> str:
    """`text` and at most `count` more tokens, up to the end of the document. The whole sequence is
    computed again for each token. Raises BadInput if the text is too long for the model."""
    encode, decode = codec(model.config.vocab_size)
    tokens = [model.bos, *encode(text)]
    longest = model.config.seq_len
    require(len(tokens) < longest,
            f"--sample has {len(tokens) - 1} tokens, and the model's sequences only {longest}")
    end = min(longest, len(tokens) + count)
    while len(tokens) < end:
        padding = -len(tokens) % BLOCK_SIZE
        padded = F.pad(torch.tensor(tokens, device=model.lm_head.device), (0, padding))
        logits = model.next_token_logits(padded, len(tokens) - 1, view)
        tokens.append(next_token(logits, temperature))
        if tokens[-1] == model.bos:
            break
    return decode(tokens[1:])


def main(argv: list[str]) -> int:
    from train_gpt import load_checkpoint, view_of
    try:
        require(len(argv) == 2, 'usage: python sample.py CHECKPOINT "TEXT"')
        model = load_checkpoint(argv[0], torch.device("cpu"))
        print(continue_text(model, view_of(model.config.num_steps, model.config), argv[1], 256))
    except BadInput as error:
        print(f"sample.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
