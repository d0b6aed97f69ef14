"""The service of a Ray cluster: real clusters of real nodes, every driver a process of its own."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Child, _children, until
from paths import HELPERS

LIMIT_S = 240.0  # a driver takes a few seconds, but many processes start in one test
pytestmark = pytest.mark.timeout(600)

TESTS = str(HELPERS)
CLUSTER = f"""
import os
import sys
os.environ["PYTHONPATH"] += os.pathsep + {TESTS!r}
os.environ["RAY_enable_worker_prestart"] = "0"  # saves a third of the time
os.environ["RAY_worker_niceness"] = "0"  # with its default, 15, workers starve beside other tests
os.environ["TQ_ADDRESS"] = "unix:/no/such/host/tq.sock"  # every worker inherits it, as from a driver elsewhere
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 2, "include_dashboard": False}})
print("address", cluster.address, flush=True)
for line in sys.stdin:
    print("node", cluster.add_node(num_cpus=1).node_id, flush=True)
cluster.shutdown()
"""

DRIVER = """
import os
import sys
os.environ["PYTHONPATH"] += os.pathsep + {tests!r}
sys.path.insert(0, {tests!r})
from cluster import *
ray.init(**{options!r})
"""


class Ray:
    """The cluster's controls, in a process of its own so that everything of Ray's ends with it."""

    def __init__(self) -> None:
        self.process = Child(CLUSTER)
        self.address = self._said("address")

    def add_node(self) -> str:
        self.process.say()
        return self._said("node")

    def _said(self, word: str) -> str:
        while True:
            line = self.process.line()
            assert line, "the cluster did not start"
            if line.startswith(word):
                return line.removeprefix(word).strip()


@pytest.fixture(scope="module")
def shared() -> Iterator[Ray]:
    """A cluster of one node with two CPUs for all tests of this module."""
    before = _children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # its default writes a token into the home directory
        ray = Ray()
        yield ray
    ray.process.finish(LIMIT_S)
    until(lambda: _children() <= before, "the end of the cluster", 15)


Driver = Callable[..., Child]


@pytest.fixture
def driver(shared: Ray, child: Callable[[str], Child]) -> Driver:
    """Starts a driver process connected to the cluster, with a job and a namespace of its own."""

    def start(code: str, **options: Any) -> Child:
        given = {"address": shared.address, "log_to_driver": False, "include_dashboard": False, **options}
        return child(DRIVER.format(tests=TESTS, options=given) + textwrap.dedent(code))

    return start


def test_a_service_on_a_busy_cluster_is_found_from_another_job(driver: Driver) -> None:
    owner = driver(
        """
        @ray.remote(num_cpus=2)
        class Hog:
            def ready(self): pass
        hog = Hog.remote()
        ray.get(hog.ready.remote())
        started = time.monotonic()
        conf = tq.init({"client": {"timeout_s": 7.0}})
        assert time.monotonic() - started < 30
        assert pickle.loads(pickle.dumps(conf)).address == conf.address == os.environ["TQ_ADDRESS"]
        assert tq.init() is None
        tq.kv_put("a", "p", {"x": torch.ones(4)})
        print(server(), conf.address, flush=True)
        input()
        tq.close()
        assert "TQ_ADDRESS" not in os.environ
        said(NotInitialized, tq.kv_list)
        said(ValueError, controller)
        """
    )
    pid, address = owner.line().split()
    code = f"""
        import warnings
        os.environ["TQ_ADDRESS"] = "unix:/no/such/host/tq.sock"
        assert tq.kv_list() == {{"p": {{"a": {{}}}}}}  # without init
        assert server() == {pid} and tq.get_client().session.is_local
        tq.close()
        conf = {{"client": {{"timeout_s": 8}}, "controller": {{"sampler": "SequentialSampler"}}, "mine": 1}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert tq.init(conf) is conf
        assert [str(w.message) for w in caught if w.category.__name__ == "ConfigMismatch"] == [
            "the running service keeps its settings: client.timeout_s is 7.0, not 8"
        ]
        find = "import transfer_queue as tq; print(tq.kv_list())"  # no Ray there
        assert subprocess.check_output([sys.executable, "-c", find], text=True) == "{{'p': {{'a': {{}}}}}}\\n"
        tq.close()
        tq.close()
        assert tq.init({{"address": {address!r}}})["address"] == {address!r}  # what the owner's configuration says
        """
    driver(code).finish(LIMIT_S)
    owner.say()
    owner.finish(LIMIT_S)
    assert not Path(address.removeprefix("unix:")).parent.exists()


def test_workers_that_race_start_one_service_and_it_ends_with_its_owner(driver: Driver) -> None:
    driver(
        """
        workers = [Worker.remote() for _ in range(4)]
        code = "conf = tq.init(); out = (conf is not None, server(), os.getpid(), os.environ['TQ_ADDRESS'])"
        found = ray.get([w.do.remote(code) for w in workers], timeout=100)
        assert sorted(mine for mine, *_ in found) == [False, False, False, True]
        assert len({pid for _, pid, *_ in found}) == 1
        first = [w for w, (mine, *_) in zip(workers, found) if not mine]
        do(first[0], "tq.kv_put('a', 'p', tag={'n': 1}); tq.close()")
        assert do(first[1], "out = tq.kv_list()") == {"p": {"a": {"n": 1}}}
        _, pid, owner, address = max(found)
        os.kill(owner, signal.SIGKILL)
        wait_for(lambda: ended(pid))
        wait_for(lambda: not os.path.exists(os.path.dirname(address.removeprefix("unix:"))))
        assert do(first[1], "out = said(ServiceUnavailable, tq.kv_list)")
        assert do(first[0], "out = said(NotInitialized, tq.kv_list)")
        assert do(first[0], "out = tq.init().address")
        assert do(first[1], "tq.close(); out = tq.init({'a': 1})") == {"a": 1}
        assert do(first[1], "out = server()") != pid
        do(first[0], "tq.close()")
        """
    ).finish(LIMIT_S)


def test_a_start_that_does_not_finish_is_taken_over(driver: Driver, tmp_path: Path) -> None:
    """The winner's server hangs while it makes its sampler; who waits for it says so, and goes on when it dies."""
    (tmp_path / "stuck.py").write_text(
        "import threading\n"
        "from transfer_queue.sampler import SequentialSampler\n"
        "class Stuck(SequentialSampler):\n"
        "    def __init__(self): threading.Event().wait()\n"
        "class Broken(SequentialSampler):\n"
        "    def __init__(self): raise TypeError('it is broken')\n"
    )
    driver(
        f"""
        env = {{"env_vars": {{"PYTHONPATH": os.environ["PYTHONPATH"] + ":" + {str(tmp_path)!r}}}}}
        winner, loser, last = [Worker.options(runtime_env=env).remote() for _ in range(3)]
        pid = do(winner, "out = os.getpid()")
        stuck = winner.do.remote("tq.init({{'controller': {{'sampler': 'stuck:Stuck'}}}})")
        def taken():
            try:
                return controller()
            except ValueError:
                return None
        wait_for(taken)
        impatient = "import transfer_queue.launch.ray as it; it.INIT_TIMEOUT_S = 5.0; out = said({{}}, tq.init)"
        text = do(last, impatient.format("ServiceUnavailable"))
        assert "waited 5 s for the server of the actor TransferQueueController" in text, text
        waiting = loser.do.remote("out = tq.init().address; tq.kv_put('a', 'p', tag={{}})")
        os.kill(pid, signal.SIGKILL)
        assert ray.get(waiting, timeout=100)
        assert do(last, "tq.init(); out = tq.kv_list()") == {{"p": {{"a": {{}}}}}}
        do(loser, "tq.close()")
        do(last, "tq.close()")
        broken = "tq.init({{'controller': {{'sampler': 'stuck:Broken'}}}})"
        assert do(last, f"out = said((ConfigError, ServiceUnavailable), lambda: {{broken}}, 30)")
        assert taken() is None
        assert do(loser, "out = tq.init().address")
        do(loser, "tq.close()")
        """
    ).finish(LIMIT_S)


def test_a_sampler_of_the_callers_runtime_environment(driver: Driver, tmp_path: Path) -> None:
    package = tmp_path / "package" / "choosing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from transfer_queue.sampler import SequentialSampler\n"
        "class Last(SequentialSampler):\n"
        "    def sample(self, ready, batch_size, **_):\n"
        "        chosen = list(ready)[-batch_size:]\n"
        "        return chosen, chosen\n"
    )
    driver(
        """
        worker = Worker.remote()
        code = "tq.init({'controller': {'sampler': 'choosing:Last'}}); c = tq.get_client();"
        code += "c.put({'x': torch.arange(4)}, partition_id='p');"
        code += "out = c.get_meta(['x'], 1, 'p', task_name='t').global_indexes"
        assert do(worker, code) == [3]
        do(worker, "tq.close()")
        """,
        runtime_env={"py_modules": [str(package)]},
    ).finish(LIMIT_S)


def test_a_dead_controller_fails_calls_promptly_and_init_after_close_starts_anew(driver: Driver) -> None:
    driver(
        """
        worker = Worker.remote()
        for end in ("actor", "server"):
            tq.init({"server": {"durability": "none"}})
            first = server()
            do(worker, "tq.init()")
            if end == "actor":
                ray.kill(controller())
            else:
                os.kill(first, signal.SIGKILL)
            wait_for(lambda: ended(first))
            assert said(ServiceUnavailable, tq.kv_list)
            assert do(worker, "out = said(ServiceUnavailable, lambda: tq.kv_put('a', 'p', tag={}))")
            do(worker, "tq.close()")
            started = time.monotonic()
            tq.close()
            assert time.monotonic() - started < 5
            assert tq.init().address
            assert server() != first
            assert do(worker, "out = tq.init({'mine': 1})") == {"mine": 1}
            tq.close()
            do(worker, "tq.close()")
        """
    ).finish(LIMIT_S)


def test_a_killed_server_is_replaced_by_its_standby(driver: Driver) -> None:
    driver(
        """
        worker = Worker.remote()
        tq.init()
        do(worker, "tq.init(); tq.kv_put('a', 'p', {'x': torch.arange(3)})")
        for number in range(2):
            first = server()
            os.kill(first, signal.SIGKILL)
            assert do(worker, "out = tq.kv_batch_get('a', 'p')['x'].unbind()[0].tolist()") == [0, 1, 2]
            assert tq.get_client().stats()["pid"] != first
        last = tq.get_client().stats()["pid"]
        do(worker, "tq.close()")
        tq.close()
        wait_for(lambda: ended(last))
        """
    ).finish(LIMIT_S)


WRITER = """
        conf = {{"backend": {{"storage_backend": "RayStore", "RayStore": {{"durable": {durable}}}}}}}
        tq.init(conf)
        keys, values = ["a", "b"], torch.arange(80_000.0).view(2, 40_000)

        class Writer:
            def write(self):
                tq.init()
                tq.kv_batch_put(keys=keys, partition_id="p", fields={{"x": values}})
                return os.getpid()

        writer = ray.remote(num_cpus=0)(Writer).remote()
        pid = ray.get(writer.write.remote())
        assert tq.get_client().stats()["engine_nbytes_used"] >= values.nbytes

        def same():
            found = tq.kv_batch_get(keys=keys, partition_id="p")["x"]
            return all(torch.equal(row, value) for row, value in zip(found.unbind(), values))

        assert same()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ended(pid))
"""


def test_rows_in_ray_die_with_their_writer_and_others_take_their_place(driver: Driver) -> None:
    driver(
        WRITER.format(durable=False)
        + """
        def is_lost():
            try:
                assert same()
            except tq.errors.DataLost:
                return True
            return False

        wait_for(is_lost)  # Ray learns of the death in a moment
        assert tq.get_client().stats()["engine_nbytes_used"] == 0
        tq.kv_batch_put(keys=keys, partition_id="p", fields={"x": values})
        assert same()
        tq.close()

        from transfer_queue.storage.engines.ray_objects import ObjectKeeper

        keeper = ObjectKeeper()
        keeper.hold("there", [ray.put(bytes(1 << 20))])
        ray.experimental.get_object_locations = lambda *_: {}  # its owner was too busy to answer
        assert keeper.missing(["there", "gone"]) == ["gone"]
        """
    ).finish(LIMIT_S)


def test_durable_rows_in_ray_outlive_their_writer_and_end_with_a_killed_server(driver: Driver) -> None:
    driver(
        WRITER.format(durable=True)
        + """
        assert same()
        name = tq.get_client().session.config["engine"]["settings"]["keeper"]
        os.kill(server(), signal.SIGKILL)

        def is_gone():
            try:
                ray.get(ray.get_actor(name, namespace="transfer_queue").find.remote([]), timeout=5)
            except (ValueError, ray.exceptions.RayError):
                return True
            return False

        wait_for(is_gone)
        """
    ).finish(LIMIT_S)


def test_an_address_that_answers_wins_and_an_explicit_one_must(driver: Driver) -> None:
    driver(
        """
        assert "/no/such/host" in said(ServiceUnavailable, lambda: tq.init({"address": "unix:/no/such/host/tq.sock"}))
        said(ServiceUnavailable, lambda: tq.init({"address": "tcp:127.0.0.1:1"}))
        os.environ["TQ_ADDRESS"] = "tcp:127.0.0.1:1"
        said(ServiceUnavailable, tq.init)
        os.environ["TQ_ADDRESS"] = "unix:/no/such/host/tq.sock"
        said(NotInitialized, tq.kv_list)
        said(ConfigError, lambda: tq.init({"controller": {"sampler": "NoSuchSampler"}}))
        from transfer_queue import config
        from transfer_queue.launch.local import start
        other = start(config.server_config(config.merged({}), "", os.getpid()))
        tq.init()
        cluster = server()
        worker = Worker.options(runtime_env={"env_vars": {"TQ_ADDRESS": other.address}}).remote()
        assert do(worker, "tq.init(); out = server()") == other.pid
        assert do(Worker.remote(), "tq.init(); out = server()") == cluster  # although its TQ_ADDRESS is stale
        do(worker, "tq.close()")
        tq.close()
        other.stop()
        """
    ).finish(LIMIT_S)


def test_another_packages_controller_is_refused(driver: Driver) -> None:
    driver(
        """
        @ray.remote(num_cpus=0)
        class Other:
            def ready(self): pass
        other = Other.options(name="TransferQueueController", namespace="transfer_queue").remote()
        ray.get(other.ready.remote())
        assert "another package" in said(ServiceUnavailable, tq.init)
        assert "another package" in said(ServiceUnavailable, tq.kv_list)
        """
    ).finish(LIMIT_S)


def test_ray_shutdown_while_attached(driver: Driver) -> None:
    owner = driver("tq.init(); tq.kv_put('a', 'p', tag={}); print(server(), flush=True); input()")
    pid = int(owner.line())
    driver(
        """
        tq.init()
        ray.shutdown()
        assert tq.kv_list() == {"p": {"a": {}}}
        tq.kv_clear("a", "p")
        started = time.monotonic()
        tq.close()
        assert time.monotonic() - started < 5
        """
    ).finish(LIMIT_S)
    owner.say()
    owner.finish(LIMIT_S)  # its exit handlers end the service before Ray's own disconnect
    until(lambda: _has_ended(pid), "the end of the server")
    driver(
        """
        tq.init()
        first = server()
        ray.shutdown()
        wait_for(lambda: ended(first))
        said(ServiceUnavailable, tq.kv_list)
        started = time.monotonic()
        tq.close()
        assert time.monotonic() - started < 5
        assert not ray.is_initialized()
        """
    ).finish(LIMIT_S)


def test_a_driver_killed_with_its_own_cluster_leaves_nothing(driver: Driver) -> None:
    code = "conf = tq.init(); print(server(), conf.address, flush=True); input()"
    owner = driver(code, address="local", num_cpus=2)
    pid, address = owner.line().split()
    of_ray = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    until(lambda: _has_ended(int(pid)), "the end of the server")
    until(lambda: not Path(address.removeprefix("unix:")).parent.exists(), "the end of its sockets")
    for process in of_ray:  # Ray takes a minute to notice
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_node_that_joined_later(shared: Ray, driver: Driver) -> None:
    owner = driver("tq.init(); tq.kv_put('a', 'p', {'x': torch.ones(1 << 20)}); print(server(), flush=True); input()")
    pid = int(owner.line())
    node = shared.add_node()
    driver(
        f"""
        workers = [Worker.options(scheduling_strategy=OnNode({node!r}, soft=False)).remote() for _ in range(2)]
        code = "tq.init(); tq.kv_put(str(os.getpid()), 'q', {{'x': torch.arange(3)}}); out = os.getpid()"
        pids = ray.get([w.do.remote(code) for w in workers], timeout=100)
        where = "out = tq.get_client().session.is_local and tq.get_client().stats()['unit']"
        assert [do(worker, where) for worker in workers] == [1, 1]
        for worker in (*workers, Worker.remote()):
            assert do(worker, "out = float(tq.kv_batch_get('a', 'p')['x'].values().sum())") == 1 << 20
            assert do(worker, "out = set(tq.kv_list('q')['q'])") == {{str(pid) for pid in pids}}
            do(worker, "tq.close()")
        """
    ).finish(LIMIT_S)
    owner.say()
    owner.finish(LIMIT_S)
    until(lambda: _has_ended(pid), "the end of the server")


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_without_ray_nothing_of_it_is_imported(child: Callable[[str], Child]) -> None:
    child(
        """
        import os, sys
        os.environ.pop("TQ_ADDRESS", None)
        import transfer_queue as tq
        tq.init()
        assert "ray" not in sys.modules
        tq.close()
        import types
        sys.modules["ray"] = types.ModuleType("ray")  # a name without the function
        tq.init()
        tq.close()
        """
    ).finish(LIMIT_S)


def test_the_actor_answers_what_programs_for_0_1_11_ask(driver: Driver) -> None:
    driver(
        """
        from transfer_queue import interface
        assert interface._TQ_CONTROLLER is None
        conf = tq.init({"controller": {"sampler": "RankAwareSampler", "polling_mode": True}, "mine": {"a": 1}})
        assert interface._TQ_CONTROLLER is not None
        actor = controller()
        def ask(name, *args):
            return ray.get(getattr(actor, name).remote(*args), timeout=60)
        tq.kv_put("a", "p", {"x": torch.ones(4), "t": "text"}, tag={"n": 1})
        tq.get_client().put({"x": torch.ones(2, 4)}, partition_id="q")
        assert ask("list_partitions") == ["p", "q"]
        found = ask("get_partition_snapshot", "p")
        row = found.keys_mapping["a"]
        assert found.production_status[row, found.field_name_mapping["x"]] == 1
        assert found.field_metadata["t"].is_non_tensor and found.custom_meta[row] == {"n": 1}
        assert ask("get_partition_snapshot", "nobody") is None
        ask("clear_partition", "p")
        ask("clear_partition", "nobody")
        assert ask("list_partitions") == ["q"]

        given = ask("get_config")
        assert given.controller.polling_mode is True and given.mine.a == 1
        assert "RankAware" in str(given.controller.sampler) and given.backend.SimpleStorage.num_data_storage_units == 2
        assert given.address is None  # every node has its own
        stream = tq.StreamingDataset(given, 2, 2, ["x"], "q", "t", 0, should_check_consumption_status=True)
        assert [len(meta) for _, meta in stream] == [2]
        assert "metrics.enabled" in said(Exception, lambda: ask("start_metrics", 0))
        ask("register_storage_units_for_metrics", {})
        ask("store_config", {"of": "mine"})
        assert ask("get_config") == {"of": "mine"}
        tq.close()
        assert interface._TQ_CONTROLLER is None
        """
    ).finish(LIMIT_S)


def test_clients_attach_by_the_info_of_the_actor(driver: Driver) -> None:
    driver(
        """
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.utils.zmq_utils import ZMQServerInfo, process_zmq_server_info
        conf = tq.init()
        infos = process_zmq_server_info({"one": controller()})
        assert infos["one"] == conf.controller.zmq_info and infos["one"].ports["request_handle_socket"]
        tq.kv_put("a", "p", tag={"n": 1})
        client = tq.TransferQueueClient("mine", infos["one"])
        client.initialize_storage_manager("AsyncSimpleStorageManager", conf.backend.SimpleStorage)
        assert client.kv_list() == {"p": {"a": {"n": 1}}}
        client.close()
        code = "info = ray.get(controller().get_zmq_server_info.remote());"
        code += "out = tq.TransferQueueClient('worker', info).kv_list()"
        assert do(Worker.remote(), code) == {"p": {"a": {"n": 1}}}

        other = TransferQueueController.options(num_cpus=0).remote(sampler="RankAwareSampler", polling_mode=True)
        client = tq.TransferQueueClient("other", process_zmq_server_info(other))
        assert client.get_partition_list() == []
        assert len(client.get_meta(["x"], 1, "p", task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0})) == 0
        pid = client.stats()["pid"]
        assert pid != server()
        client.close()
        ray.kill(other)
        wait_for(lambda: ended(pid))
        tq.close()
        """
    ).finish(LIMIT_S)
