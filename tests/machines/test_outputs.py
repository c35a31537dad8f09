"""Outputs of functions of several machines: each combines the parts of its ranks first."""

import pytest
from support import hosts
from support.machine_scripts import finish, start

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")


@pytest.mark.slow("starts a job of MPI")
def test_outputs_are_combined_in_each_machine_and_then_between_them(two_hosts, tmp_path):
    script = """
    import functools
    from synkhronos._arithmetic import partition

    rng = np.random.RandomState(0)
    m = T.fmatrix("m")
    kinds = "sum avg max min prod gather".split()
    outputs = [(m.sum(0), kind) for kind in kinds]
    f = synk.function([m], [*outputs, (T.cast(m.sum(0), "int32"), "avg")])

    def expected(ranks, parts, counts):
        wide = [part.sum(0, dtype="f8").astype("f4") for part in parts]
        def of(ufunc, values):
            of_ranks = list(zip(ranks, values))
            machines = [[v for rank, v in of_ranks if rank // 2 == host] for host in (0, 1)]
            machines = [each for each in machines if each]
            return functools.reduce(ufunc, [functools.reduce(ufunc, each) for each in machines])
        weighted = [part * np.float32(count) for part, count in zip(wide, counts)]
        whole = [part.astype("int32") for part in wide]
        return [
            of(np.add, wide),
            of(np.add, weighted) / np.float32(sum(counts)),
            of(np.maximum, wide),
            of(np.minimum, wide),
            of(np.multiply, wide),
            np.concatenate(wide),
            np.average(whole, 0, counts),
        ]

    for columns in (5, 30_000, 5):  # what goes with the message, and what is fetched
        for rows in (13, 4, 3):  # the last rank has none of three
            data = rng.randn(rows, columns).astype("f4")
            edges = partition.edges(rows, n)
            ranks = [rank for rank in range(n) if edges[rank] < edges[rank + 1]]
            parts = [data[edges[rank] : edges[rank + 1]] for rank in ranks]
            sizes = [len(part) for part in parts]
            found = f(data)
            for kind, one, other in zip([*kinds, "int"], found, expected(ranks, parts, sizes)):
                if kind in ("int", "prod", "gather"):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
                else:
                    assert one.tobytes() == other.tobytes(), (kind, rows, columns)
            [subset] = f(data, output_subset=[1])
            assert subset.tobytes() == found[1].tobytes()
    unequal = synk.function([m], (m.flatten(), "sum"))
    try:
        unequal(np.zeros((7, 3), "f4"))
    except ValueError as error:
        print("refused", "different shapes, [(3,), (6,), (6,), (6,)]." in str(error))
    print("ended", flush=True)
    """
    output = finish(start(two_hosts, script, tmp_path, ranks=2))
    assert output.splitlines()[-2:] == ["refused True", "ended"], output
    assert two_hosts.is_empty()
