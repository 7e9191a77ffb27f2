"""Reads as much of a PNG picture as a check needs; it draws nothing and needs no library."""
import struct
import zlib

from .log import Refused, read_bytes

HEADER = b"\x89PNG\r\n\x1a\n"


def read_png(path):
    """{keyword: text} of a picture's text chunks. Raises Refused unless it is a PNG picture,
    undamaged and whole, that has at least one pixel."""
    raw = read_bytes(path)
    if not raw.startswith(HEADER):
        raise Refused(f"{path}: expected a PNG picture, found other bytes; draw it again.")
    at = len(HEADER)
    kinds = []
    texts = {}
    pixels = 0
    while at + 12 <= len(raw):  # length, kind, content, checksum
        length, kind = struct.unpack(">I4s", raw[at:at + 8])
        content = raw[at + 8:at + 8 + length]
        checksum = raw[at + 8 + length:at + 12 + length]
        if checksum != struct.pack(">I", zlib.crc32(kind + content)):
            raise Refused(f"{path}: expected an undamaged PNG picture, found a wrong checksum or "
                          f"the end of the file in what begins at byte {at}; draw it again.")
        if kind == b"IHDR" and length >= 8:
            width, height = struct.unpack(">II", content[:8])
            pixels = width * height
        if kind == b"tEXt":
            keyword, _, text = content.partition(b"\0")
            texts[keyword.decode("latin-1")] = text.decode("latin-1")
        if kind != b"IDAT" or length:
            kinds.append(kind)
        at += 12 + length
    whole = kinds[:1] == [b"IHDR"] and b"IDAT" in kinds and kinds[-1:] == [b"IEND"]
    if not (whole and pixels and at == len(raw)):
        raise Refused(f"{path}: expected a whole PNG picture, found an empty or cut one; "
                      "draw it again.")
    return texts
