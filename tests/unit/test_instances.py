"""Objects are found by their classes, and other threads don't notice."""

import threading

from synkhronos._machine.instances import classes_of_all, instances_of


class Kind:
    pass


class Derived(Kind):
    pass


def test_other_threads_make_tuples_meanwhile():
    many = [[] for _ in range(200_000)]  # so that Python changes threads while it looks
    kept, end, errors, n_made = [Kind(), Derived()], threading.Event(), [], 0

    def make():
        nonlocal n_made
        while not end.is_set():
            try:
                n_made += len(tuple(each + 1 for each in range(50))) == 50
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(15):
            assert instances_of(Kind) == kept[:1]
            assert {*instances_of(Derived, Kind)} == {*kept}
            assert {Kind, Derived} <= classes_of_all()
    finally:
        end.set()
        thread.join()
    assert len(many) and n_made > 15 and errors == []
