"""``findings``: judges the facts that ranks report. A finding passes, or warns or fails and names a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lagom.cluster import backend_word, device_word
from lagom.device_models import DeviceModel, describe_differences

Level = Literal["pass", "warn", "fail"]
Facts = Sequence[Mapping[str, Any]]
"""The results of ``examine``, in rank order."""
_SCRATCH = 1 << 30  # bytes
_MEMORY = 1 << 30
_SHARED = 256 << 20
_FILES = 4096  # enough for the host process of 400 ranks, and for programs with many loader workers
_SHOWN = 8  # most hosts that the finding about the network lists
_CLOCK_S = 1.0
_LAUNCH_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: level, subject of the check, result, and remedy ("" for none)."""

    level: Level
    what: str
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the fields as a dict, for ``lagom doctor --json``."""
        return asdict(self)


def findings(facts: Facts, launch_s: float) -> list[Finding]:
    """Return the findings for the facts of a run that took ``launch_s`` seconds."""
    checks = (
        _hosts,
        _versions,
        _accelerators,
        _models,
        _cores,
        _memory,
        _network,
        _exchange,
        _driver,
        _shared,
        _scratch,
        _files,
        _compiled,
        _compiler,
        _clocks,
    )
    return [_launch(facts, launch_s), *(found for check in checks if (found := check(facts)) is not None)]


def _launch(facts: Facts, launch_s: float) -> Finding:
    found = f"{_count(len(facts), 'rank')} ran and came back in {launch_s:.1f} s"
    if launch_s > _LAUNCH_S:
        return Finding("warn", "launch", found, "the first run on a cluster starts Python on it; run this again")
    return Finding("pass", "launch", found)


def _hosts(facts: Facts) -> Finding:
    by_host: dict[str, list[int]] = {}
    for one in facts:
        by_host.setdefault(one["host"], []).append(one["rank"])
    return Finding("pass", "hosts", ", ".join(f"{host}: {_count(len(own), 'rank')}" for host, own in by_host.items()))


def _versions(facts: Facts) -> Finding:
    found = []
    for name in ("python", "torch", "lagom"):
        versions = {one[name]: one["host"] for one in facts}
        if len(versions) > 1:
            told = ", ".join(f"{version} on {host}" for version, host in versions.items())
            return Finding("warn", "versions", f"{name}: {told}", "install the same on all executors")
        found.append(f"{name} {next(iter(versions))}")
    return Finding("pass", "versions", ", ".join(found))


def _accelerators(facts: Facts) -> Finding:
    if not any(one["device"] for one in facts):
        hidden = [one["host"] for one in facts if one["nvidia"]]
        if not hidden:
            return Finding("pass", "accelerators", "none: ranks train on CPUs")
        if not facts[0]["cuda_build"]:
            remedy = "install a CUDA build of torch on the executors"
        else:
            remedy = "have Spark hand them out (spark.task.resource.gpu.amount), or look at CUDA_VISIBLE_DEVICES"
        return Finding("warn", "GPUs", f"{hidden[0]} has NVIDIA GPUs, and ranks there see none", remedy)
    kind = next(one["device"]["kind"] for one in facts if one["device"])
    word = device_word(kind)
    without = [one["rank"] for one in facts if not one["device"]]
    if without:
        remedy = f"give every task one {word} (spark.task.resource.gpu.amount), or none"
        return Finding("fail", f"{word}s", f"ranks {without} have none, and others have", remedy)
    devices = {(one["host"], one["device"]["uuid"] or one["rank"]) for one in facts}
    names = ", ".join(sorted({one["device"]["name"] for one in facts}))
    if len(devices) < len(facts):
        remedy = f"one {word} for each task (spark.task.resource.gpu.amount=1) lets {backend_word(kind)} be used"
        return Finding("warn", f"{word}s", f"{names}: {len(facts)} ranks share {len(devices)}", remedy)
    return Finding("pass", f"{word}s", f"{names}: one for each rank")


def _models(facts: Facts) -> Finding | None:
    """Return a finding if ranks have accelerators of different models, multiprocessors or drivers; else None."""
    found = {f"rank {one['rank']} on {one['host']}": one["device"] for one in facts}
    if not all(found.values()):
        return None
    names = [model_field.name for model_field in fields(DeviceModel)]
    models = {owner: DeviceModel(**{name: one[name] for name in names}) for owner, one in found.items()}
    if not (line := describe_differences(models)):
        return None
    word = device_word(next(iter(models.values())).kind)
    return Finding("warn", f"{word} models", line, "give all ranks the same, so that their numbers are those of one")


def _cores(facts: Facts) -> Finding:
    crowded = [one for one in facts if one["ranks_here"] > one["cores"]]
    if crowded:
        one = crowded[0]
        found = f"{one['host']} has {one['ranks_here']} ranks on {_count(one['cores'], 'core')}"
        return Finding("warn", "cores", found, "take fewer ranks; more than cores are slower")
    share = min(one["cores"] // one["ranks_here"] for one in facts)
    return Finding("pass", "cores", f"{share} or more for each rank")


def _memory(facts: Facts) -> Finding:
    least = min(facts, key=lambda one: one["memory"])
    found = f"{_size(least['memory'])} or more for each rank"
    if least["memory"] < _MEMORY:
        remedy = "raise the container's limit (on Spark also spark.executor.memoryOverhead), or take fewer ranks"
        return Finding("warn", "memory", f"{found} ({least['host']})", remedy)
    return Finding("pass", "memory", found)


def _network(facts: Facts) -> Finding | None:
    """Return a finding that lists the hosts' network interfaces; None for one rank.

    The finding always passes, since the ranks have connected.
    """
    if len(facts) < 2 or facts[0]["ip"] is None:
        return None
    by_host = {one["host"]: f"{one['interface'] or 'an unnamed interface'} ({one['ip']})" for one in facts}
    if len(by_host) == 1:
        return Finding("pass", "network", f"ranks are on one host, at {next(iter(by_host.values()))}")
    told = ", ".join(f"{host}: {interface}" for host, interface in list(by_host.items())[:_SHOWN])
    more = f" and {len(by_host) - _SHOWN} more" if len(by_host) > _SHOWN else ""
    return Finding("pass", "network", f"{len(by_host)} hosts reach each other; {told}{more}")


def _shared(facts: Facts) -> Finding | None:
    told = [one for one in facts if one["shared"] is not None]
    if not told:
        return None
    least = min(told, key=lambda one: one["shared"])
    found = f"{_size(least['shared'])} or more on each host"
    if least["shared"] < _SHARED:
        remedy = "workers of data loaders need it: docker run --shm-size=1g, in Kubernetes a memory volume at /dev/shm"
        return Finding("warn", "/dev/shm", f"{found} ({least['host']})", remedy)
    return Finding("pass", "/dev/shm", found)


def _exchange(facts: Facts) -> Finding | None:
    if len(facts) < 2:
        return None
    latency, speed = max(one["latency_s"] for one in facts), min(one["bytes_s"] for one in facts)
    found = f"{facts[0]['way']}: 4 KB take {latency * 1e6:,.0f} us, 16 MB go at {speed / 1e9:.2f} GB/s"
    one_host = len({one["host"] for one in facts}) == 1
    if one_host and facts[0]["way"] == "sockets" and not facts[0]["device"]:
        remedy = "shared memory would be faster: install lagom where there is a C++ compiler"
        return Finding("warn", "exchanges", found, remedy)
    return Finding("pass", "exchanges", found)


def _driver(facts: Facts) -> Finding | None:
    told = [one for one in facts if one["reaches_driver"] is not None]
    if not told:
        return None
    cut_off = [one for one in told if one["reaches_driver"]]
    if cut_off:
        found = f"{cut_off[0]['host']} cannot reach it: {cut_off[0]['reaches_driver']}"
        remedy = "runs work, and show nothing until they end; set spark.driver.host to an address that executors reach"
        return Finding("warn", "driver", found, remedy)
    return Finding("pass", "driver", "all ranks reach it")


def _scratch(facts: Facts) -> Finding:
    least = min(facts, key=lambda one: one["scratch"] or 0)
    found = f"{_size(least['scratch'] or 0)} or more for temporary files"
    if (least["scratch"] or 0) < _SCRATCH:
        return Finding("warn", "disk", f"{found} ({least['host']})", "free some, or set TMPDIR on the executors")
    return Finding("pass", "disk", found)


def _files(facts: Facts) -> Finding | None:
    short = {one["host"]: one["files"] for one in facts if 0 <= one["files"] < _FILES}
    if not short:
        return None
    found = f"a process may open {next(iter(short.values()))} on {', '.join(sorted(short)[:4])}"
    return Finding("warn", "open files", found, "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)")


def _compiled(facts: Facts) -> Finding:
    without = {one["host"]: one["no_compiled_part"] for one in facts if one["no_compiled_part"]}
    if without:
        found = f"not on {', '.join(sorted(without)[:4])}: {next(iter(without.values()))}"
        remedy = "install a wheel for this Python, or lagom where there is a C++ compiler; all works without"
        return Finding("warn", "compiled part", found, remedy)
    return Finding("pass", "compiled part", "there on every rank")


def _compiler(facts: Facts) -> Finding:
    without = sorted({one["host"] for one in facts if not one["compiler"]})
    if without:
        remedy = "only backend='deepspeed' and torch.compile need one (Debian, Ubuntu: apt-get install g++)"
        return Finding("warn", "C++ compiler", f"none on {', '.join(without[:4])}", remedy)
    return Finding("pass", "C++ compiler", str(facts[0]["compiler"]))


def _clocks(facts: Facts) -> Finding | None:
    if len(facts) < 2:
        return None
    worst = max(facts, key=lambda one: abs(one["clock_s"]))
    found = f"within {abs(worst['clock_s']) * 1e3:.1f} ms of rank 0's"
    if abs(worst["clock_s"]) > _CLOCK_S:
        return Finding("warn", "clocks", f"{worst['host']} is {worst['clock_s']:+.1f} s off", "set clocks by NTP")
    return Finding("pass", "clocks", found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
