"""All-reduce as an operation of a Theano graph, also of arrays on devices."""

from theano import gof

from synkhronos._host.base import rank_operations
from synkhronos._host.base.calls import current_call
from synkhronos._host.theano import device_arrays


class TheanoAllReduce(rank_operations.AllReduce):
    """Reduces each input over the ranks; those `lent` stay in the memory of ranks: `lending`."""

    __props__ = (*rank_operations.AllReduce.__props__, "lent")
    bucket = None  # its number, if the reduction was begun before: see `overlapping`

    def __init__(self, ops, serials, inplace=False, lent=()):
        super().__init__(ops, serials, inplace)
        self.lent = lent or (False,) * len(ops)

    def as_input(self, x):
        is_on_device = isinstance(x, gof.Variable) and device_arrays.is_device_type(x.type)
        return x if is_on_device else super().as_input(x)

    def perform(self, node, inputs, output_storage):
        call = current_call()
        if call is None:
            for x, storage in zip(inputs, output_storage):
                storage[0] = x if self.inplace else x.copy()
            return
        targets = []
        for x, storage, lent in zip(inputs, output_storage, self.lent):
            if lent:
                target = None
            elif self.inplace:
                target = x
            else:
                kept = storage[0]
                fits = kept is not None and kept.shape == x.shape
                target = kept if fits else device_arrays.empty_like(x)
            targets.append(target)
        results = call.reduce(inputs, self.ops, targets, self.bucket)
        for storage, result in zip(output_storage, results):
            storage[0] = result


all_reduce = TheanoAllReduce.of


def _lift_all_reduces():
    """Let Theano's backend move AllReduces to the device."""
    from theano.gpuarray import opt
    from theano.gpuarray.basic_ops import as_gpuarray_variable

    @opt.register_opt("fast_compile")
    @opt.op_lifter([TheanoAllReduce])
    @opt.register_opt2([TheanoAllReduce], "fast_compile")
    def local_gpua_all_reduce(op, context_name, inputs, outputs):
        return op(*[as_gpuarray_variable(x, context_name) for x in inputs], return_list=True)


device_arrays.when_open.append(_lift_all_reduces)
