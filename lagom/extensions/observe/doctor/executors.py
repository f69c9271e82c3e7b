"""``executor_findings``: judges a survey of Spark's executors: whether they have torch and reach each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.observe.doctor.findings import Finding
from lagom.plan import Package
from lagom.program.missing_packages import remedy

APART = (
    "ranks connect to each other at ports that the system chooses: let executors reach each other at all ports; where "
    "they have several networks, GLOO_SOCKET_IFNAME names the interface of the one that joins them"
)
_INSTALL = (
    "install torch there; or, before a Spark session is made, set PYSPARK_PYTHON to a Python that has it on every host"
)
_SHOWN = 4


def executor_findings(tasks: Sequence[Mapping[str, Any]], packages: Sequence[Package] = ()) -> list[Finding]:
    """Return the findings for the facts of ``tasks``. If a finding has the level "fail", no run can start.

    Args:
        packages: the packages of this process that the program imports.
    """
    checks = (_torch, _addresses, _reach)
    found = [_pythons(tasks), *(found for check in checks if (found := check(tasks)) is not None)]
    return [*found, *package_findings(tasks, [package for package in packages if package.name != "torch"])]


def package_findings(tasks: Sequence[Mapping[str, Any]], packages: Sequence[Package]) -> list[Finding]:
    """Return the findings about the program's packages: those that executors lack, and other versions."""
    package_rows = [_missing(tasks, packages, is_needed=True), _missing(tasks, packages, is_needed=False)]
    others = [text for package in packages if (text := _other_versions(tasks, package))]
    if others:
        how = "install the driver's versions there, or run 'lagom pack' and use its archive"
        package_rows.append(Finding("warn", "packages", "; ".join(others), how))
    findings = [one for one in package_rows if one is not None]
    if packages and not findings:
        same = f"{', '.join(map(str, packages))}: the same on all executors"
        findings.append(Finding("pass", "packages", same))
    return findings


def _missing(tasks: Sequence[Mapping[str, Any]], packages: Sequence[Package], *, is_needed: bool) -> Finding | None:
    """Return a failure with the needed packages that executors lack, or a warning with the others; None if none."""
    missing = {
        package: hosts
        for package in packages
        if package.is_needed == is_needed and (hosts := _hosts(tasks, package, None))
    }
    if not missing:
        return None
    told = "; ".join(f"{package} is not on {_few(hosts)}" for package, hosts in missing.items())
    if is_needed:
        return Finding("fail", "packages", told, remedy(list(missing)))
    return Finding("warn", "packages", f"{told}: for code that imports it", remedy(list(missing)))


def _other_versions(tasks: Sequence[Mapping[str, Any]], package: Package) -> str:
    """Return the versions of ``package`` on executors that have another one than the driver; "" without any."""
    versions = {one["packages"][package.name] for one in tasks} - {None, "", package.version}
    if not package.version or not versions:
        return ""
    told = ", ".join(f"{version} on {_few(_hosts(tasks, package, version))}" for version in sorted(versions))
    return f"{package} on the driver, {told}"


def _hosts(tasks: Sequence[Mapping[str, Any]], package: Package, version: str | None) -> list[str]:
    return list(dict.fromkeys(one["host"] for one in tasks if one["packages"][package.name] == version))


def _pythons(tasks: Sequence[Mapping[str, Any]]) -> Finding:
    found = _by(tasks, lambda one: f"Python {one['python']} ({one['executable']})")
    told = "; ".join(text if len(found) == 1 else f"{text} on {_few(hosts)}" for text, hosts in found.items())
    hosts = len({one["host"] for one in tasks})
    many = f"{len(tasks)} task{'s' * (len(tasks) != 1)} on {hosts} host{'s' * (hosts != 1)}"
    return Finding("pass", "executors", f"{many}: {told}")


def _torch(tasks: Sequence[Mapping[str, Any]]) -> Finding | None:
    without = [one for one in tasks if one["torch"] is None]
    if without:
        pythons = _by(without, lambda one: str(one["executable"]))
        told = "; ".join(f"{python} on {_few(hosts)}" for python, hosts in pythons.items())
        return Finding("fail", "torch", f"there is none for {told}", _INSTALL)
    found = _by(tasks, lambda one: str(one["torch"]).split("+")[0])
    if len(found) > 1:
        told = ", ".join(f"{version} on {_few(hosts)}" for version, hosts in found.items())
        return Finding("fail", "torch", f"several versions: {told}", "install the same on all executors")
    return None


def _addresses(tasks: Sequence[Mapping[str, Any]]) -> Finding | None:
    without = [one for one in tasks if one.get("no_address")]
    if not without:
        return None
    told = f"{without[0]['host']} has no address for the others: {without[0]['no_address']}"
    return Finding(
        "fail", "network", told, "GLOO_SOCKET_IFNAME is to name an interface that every host has, or not to be set"
    )


def _reach(tasks: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return a failure with the pairs of hosts that cannot connect; None if all hosts reach each other."""
    apart = [(one["host"], each) for one in tasks for each in one.get("unreached") or ()]
    told = list(
        dict.fromkeys(
            f"{host} does not reach {each['host']} at {each['address']} ({each['why']})" for host, each in apart
        )
    )
    if not told:
        return None
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return Finding("fail", "network", "; ".join(told[:_SHOWN]) + more, APART)


def _by(tasks: Sequence[Mapping[str, Any]], what: Any) -> dict[str, list[str]]:
    """Return the distinct hosts of ``tasks``, grouped by the text that ``what`` returns for a task."""
    found: dict[str, list[str]] = {}
    for one in tasks:
        hosts = found.setdefault(what(one), [])
        if one["host"] not in hosts:
            hosts.append(one["host"])
    return found


def _few(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return ", ".join(hosts[:_SHOWN]) + more
