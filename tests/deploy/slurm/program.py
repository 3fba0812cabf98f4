"""Program of the steps in tests: reads a service, uses parameter servers, and obeys its argument.

python program.py read         read all elements exactly, use the parameter servers; exit 7
python program.py slow FILE    append each element to FILE; on SIGTERM stop reading, close, and
                               exit 0
python program.py scale        read exactly, and see four data workers meanwhile; exit 0
python program.py save         wait for SIGTERM, then read a variable and an element; exit 5
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import headrace as hr
from headrace.service.config import parse_service
from headrace.service.messages import GetStatus
from headrace.service.stub import DispatcherStub

COUNT = 600


def squares(keys, count=COUNT):
    distribute = hr.service.distribute(
        hr.service.ShardingPolicy.DYNAMIC,
        os.environ["HEADRACE_SERVICE"],
        job_name="numbers",
        security=keys,
    )
    return hr.Dataset.range(count).map(slow_square).apply(distribute)


def wait_for_workers(keys, count):
    target = os.environ["HEADRACE_DISPATCHER"]
    with DispatcherStub(parse_service(target), security=keys) as stub:
        for _ in range(300):
            workers = stub.call(GetStatus(), timeout=5.0).workers
            if len(workers) == count:
                return
            time.sleep(0.2)
    raise TimeoutError(f"{len(workers)} workers, not {count}, after 60 s")


def slow_square(x):
    time.sleep(0.01)
    return x * x


def main(mode: str, *arguments: str) -> int:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    keys = hr.service.Security.load(os.environ["HEADRACE_KEYS"], "client")
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    print("tasks", {name: len(tasks) for name, tasks in cluster.items()}, flush=True)
    if mode == "slow":
        with open(arguments[0], "a") as file:
            elements = iter(squares(keys))
            for count, value in enumerate(elements, 1):
                print(int(value), file=file, flush=True)
                if count % 50 == 0:
                    print("read", count, flush=True)
                if stopped.is_set():
                    break
            elements.close()
        print("left" if stopped.is_set() else "finished", flush=True)
        return 0
    if mode == "scale":
        count = 8 * COUNT
        with ThreadPoolExecutor(1) as pool:
            grown = pool.submit(wait_for_workers, keys, 4)
            found = sorted(int(x) for x in squares(keys, count))
            grown.result()
        assert found == [x * x for x in range(count)], f"{len(found)} elements"
        print("scaled out", flush=True)
        return 0
    strategy = hr.distribute.ParameterServerStrategy(security=keys)
    with strategy.scope():
        variable = hr.Variable([1.0, 2.0])
    if mode == "save":
        print("ready", flush=True)
        if not stopped.wait(100.0):
            return 1
        time.sleep(1.0)
        print("saved", variable.numpy().tolist(), int(next(iter(squares(keys)))) >= 0, flush=True)
        return 5
    found = []
    for value in squares(keys):
        found.append(int(value))
        if len(found) == 20:
            print("reading", flush=True)
    assert sorted(found) == [x * x for x in range(COUNT)], f"{len(found)} elements"
    with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
        values = [coordinator.schedule(lambda: 3) for _ in range(8)]
        coordinator.join(60.0)
        assert coordinator.fetch(values) == [3] * 8
    modes = {
        oct(os.stat(os.path.join(folder, name)).st_mode & 0o777)
        for folder, _, names in os.walk(os.environ["HEADRACE_KEYS"])
        for name in names
    }
    print("exact", variable.numpy().tolist(), "files", *modes, flush=True)
    return 7


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
