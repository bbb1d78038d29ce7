"""The .npy format without pickle: NumPy's own header parser, and sizes that must add up."""

import io
import math
from functools import lru_cache

import numpy as np

READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npy(contents: bytes) -> np.ndarray:
    """The array of a .npy file; pickled objects, a short file and trailing bytes are ValueErrors."""
    dtype, shape, start = npy_header(contents)
    values = math.prod(shape)
    if len(contents) - start != values * dtype.itemsize:
        raise ValueError(
            f"array holds {len(contents) - start} bytes, its header {shape} {dtype} says otherwise"
        )
    return np.frombuffer(contents, dtype, values, start).reshape(shape).copy()


def npy_header(beginning: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """dtype, shape and where the values start. Only C-ordered arrays of numbers are accepted."""
    length = int.from_bytes(beginning[8:10], "little") + 10 if beginning[6:7] == b"\x01" else None
    return _parse(beginning[:length])


@lru_cache(maxsize=4096)  # a corpus has few shapes, and NumPy's parser is slow
def _parse(header: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        shape, column_major, dtype = READERS[version](stream)
    except Exception as error:  # the parser lets the tokenizer's and the compiler's own errors through
        raise ValueError(f"its .npy header is broken: {error}") from error
    if dtype.hasobject:
        raise ValueError("array holds pickled Python objects, which are never loaded")
    if column_major:
        raise ValueError("array is in Fortran order")
    return dtype, shape, stream.tell()


def npy_bytes(array: np.ndarray) -> bytes:
    """The array as fp16 in .npy format."""
    stream = io.BytesIO()
    values = np.ascontiguousarray(array, dtype="<f2")
    np.lib.format.write_array(stream, values, version=(1, 0), allow_pickle=False)
    return stream.getvalue()
