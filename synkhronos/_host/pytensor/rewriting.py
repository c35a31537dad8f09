"""Operations for numba, in place of those of graphs.

    in numba's code    Dot ──▶ an array ──▶ a call of Python that reduces it ──▶ Elemwise

Numba leaves PyTensor's rewrites for BLAS out, so no product is computed in shared memory.
"""

import importlib

from pytensor.compile.mode import optdb
from pytensor.graph.rewriting.basic import WalkingGraphRewriter, node_rewriter

from synkhronos._host.base.rank_operations import RankOperation
from synkhronos._host.base.rows import Rows
from synkhronos._host.base.server_operations import Await, Push


@node_rewriter([RankOperation, Rows, Push, Await])
def _for_numba(fgraph, node):
    # Imported here because it imports numba, which takes a second, and a C mode needs no numba.
    numba_operations = importlib.import_module("synkhronos._host.pytensor.numba_operations")
    op = numba_operations.for_numba(node.op)
    return False if op is None else op(*node.inputs, return_list=True)


# This is for all functions that numba compiles, also those of users.
optdb.register(
    "synkhronos_numba", WalkingGraphRewriter(_for_numba, order="in_to_out"), "numba", position=90
)
