"""Operations of the host that are not there for PyTensor yet."""


def _pending(*args, **kwargs):
    raise NotImplementedError("This is not available on PyTensor yet.")


draws_of_all_rows = _pending
