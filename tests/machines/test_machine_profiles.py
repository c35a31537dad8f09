"""Profiles of ranks on several machines, which the master asks for their spans."""

import pytest
from support import hosts
from support.machine_scripts import finish, start

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")


@pytest.mark.slow("starts a job of MPI")
def test_a_profile_can_be_read_by_another_thread_and_is_left_alone_by_children(two_hosts, tmp_path):
    script = """
    from synkhronos.profiling.timeline import NUMBERS

    found = set()

    def read():
        while not stop.is_set():
            found.add(len(recorded.summary()) > 0)
            time.sleep(0.01)

    stop, thread = threading.Event(), threading.Thread(target=read)
    with synk.profile(room=2000) as recorded:
        thread.start()
        for number in range(60):
            assert plain(quiet + 7) == 7 * n
            reducing(quiet + 7)
            if number == 30:
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
        stop.set()
        thread.join()
    print(found, synk.gather(w).tolist())
    for spans in recorded._recording.read()[0]:
        parts = spans["part"].tolist()
        counts = [parts.count(NUMBERS[part]) for part in ("start", "compute", "finish")]
        print(counts[1], min(counts[0], counts[2]) >= 120, sorted(spans["begin"]) != [])
    """
    lines = finish(start(two_hosts, script, tmp_path, ranks=2)).splitlines()
    total = [[60 * 4 * 7.0] * 3] * 4
    assert lines[-5:] == [f"{{True}} {total}", *["120 True True"] * 4]
    assert two_hosts.is_empty()
