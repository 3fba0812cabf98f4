"""Run data workers as Ray actors; one is killed while a trainer reads, and nothing is lost."""

import ray

import headrace as hr


@ray.remote(max_restarts=-1)
class DataWorker:
    def __init__(self, dispatcher_address):
        config = hr.service.WorkerConfig(dispatcher_address=dispatcher_address)
        self.server = hr.service.WorkerServer(config)

    def address(self):
        return self.server.address


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with hr.service.DispatchServer() as dispatcher:
        workers = [DataWorker.remote(dispatcher.target.split("://")[1]) for _ in range(2)]
        print("workers at", ray.get([worker.address.remote() for worker in workers]))
        numbers = hr.Dataset.range(2000).map(lambda x: int(x) ** 2).batch(10)
        distribute = hr.service.distribute(
            hr.service.ShardingPolicy.DYNAMIC, service=dispatcher.target
        )
        seen = []
        for step, batch in enumerate(numbers.apply(distribute)):
            seen += batch.tolist()
            if step == 20:
                ray.kill(workers[0], no_restart=False)
        assert sorted(seen) == [number**2 for number in range(2000)]
        print("read", len(seen), "numbers, each once")
    ray.shutdown()
