"""C code that operations of this folder have in common."""

from pathlib import Path

FLOATS = ("float32", "float64")


def beside(module):
    """Return the code in the ``.h`` file beside the file of a module."""
    return Path(module).with_suffix(".h").read_text(encoding="utf-8")


def allocate(output, shape, like, fail):
    """Return C code that makes a contiguous output, unless that of the last call has its shape.

    `output` and `like` are names of arrays: the output gets the dtype of `like`. `shape` has C
    expressions of its lengths, `fail` is C code that leaves the operation with an error.
    """
    fits = "".join(f" && PyArray_DIM({output}, {i}) == {n}" for i, n in enumerate(shape))
    return f"""
        if (!({output} && PyArray_ISCARRAY({output}){fits})) {{
            npy_intp shape[] = {{{", ".join(shape)}}};
            Py_XDECREF({output});
            {output} = (PyArrayObject*) PyArray_EMPTY({len(shape)}, shape, PyArray_TYPE({like}), 0);
            if (!{output}) {{ {fail} }}
        }}
    """
