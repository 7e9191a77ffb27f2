"""Tokens are one word if they differ only in case, accents, or a space before."""
import numpy as np

from data import spellings
from data.gpt2 import byte_to_token


def test_words_that_differ_in_case_accents_or_a_space_are_one():
    tokens = ["The", " the", "THÉ", "them", " ", "  the", "e\u0301", "É", "\ufb01", "fi"]
    cut = [b"\xc3", b"\xa9", b" \xc3"]  # parts of characters stand for themselves
    numbers = spellings.first_spellings([token.encode() for token in tokens] + cut)
    assert numbers.tolist() == [0, 0, 0, 3, 4, 5, 6, 6, 8, 8, 10, 11, 12]


def test_gpt2s_and_bytes_spellings_are_known_and_other_tokens_stand_for_themselves():
    gpt2 = spellings.of_vocabulary(50304)
    assert gpt2[[464, 383, 1169, 262]].tolist() == [262] * 4  # The, the, each with and without a space
    assert gpt2[50256:].tolist() == [*range(50256, 50304)]
    assert np.array_equal(gpt2[gpt2], gpt2) and (gpt2 <= np.arange(50304)).all()
    read_bytes = spellings.of_vocabulary(272)
    capital, small, brace, space = (int(byte_to_token[ord(sign)]) for sign in "Aa{ ")
    assert read_bytes[small] == read_bytes[capital] == capital
    others = [brace, space, 200, 255, 256, 271]
    assert read_bytes[others].tolist() == others
    assert spellings.of_vocabulary(64).tolist() == [*range(64)]
