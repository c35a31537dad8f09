"""A checked request for a run: the rule, the model, the devices, the options and the settings."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping

from synkhronos import _wording
from synkhronos.launch.mpirun import Options
from synkhronos.launch.where import is_here
from synkhronos.rules import modelfile as _modelfile
from synkhronos.rules import options as _options
from synkhronos.rules.job import Job
from synkhronos.rules.places import NO_DEVICE, RankPlace, by_host, find_places

DEVICES = "SYNKHRONOS_RULE_DEVICES"


def devices_in_place(named: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return the devices in ``$SYNKHRONOS_RULE_DEVICES``, or those that a script or file names.

    With the variable set, an unchanged script runs on other devices.

    >>> devices_in_place(["cuda0", "cuda1"], {DEVICES: "cpu,cpu"})
    'cpu,cpu'
    """
    return environment.get(DEVICES) or named


@dataclass(frozen=True)
class Request:
    """All that the launcher needs. Scripts, commands and files make it by `of`."""

    rule: str
    places: list[RankPlace]  # of the named devices, without an extra process for the server
    modelfile: str
    modelclass: str
    options: dict[str, Any] = field(default_factory=dict)  # all options of the rule
    settings: dict[str, Any] = field(default_factory=dict)  # of the model and its data
    log_path: str = "./logs/"
    bind: bool = False
    grace: float = 30.0  # seconds to end, after a Ctrl-C
    reach: Options = field(default_factory=Options)  # how to reach other machines

    @classmethod
    def of(
        cls,
        rule: str,
        devices: Any,
        modelfile: str,
        modelclass: str,
        settings: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
        hosts: str | None = None,
        hostfile: str | None = None,
        **reach: Any,
    ) -> Request:
        """Check all arguments of a run, before anything is started; return the request.

        `devices`, `hosts` and `hostfile` are as `find_places` takes them, `given` has options of
        the rule and the launcher, `reach` has fields of `Options`.

        Raises
        ------
        TypeError, ValueError, FileNotFoundError, ImportError
            For a wrong argument, or if a model file, its class, or what it imports is missing.

        Examples
        --------
        >>> Request.of("BSP", "cpu,cpu", "models.none", "Model")
        Traceback (most recent call last):
        FileNotFoundError: there is no module 'models.none': ...
        """
        options, own = _options.check(rule, **(given or {})), {}
        for name, option in _options.of_rule(rule).items():
            if option.is_of_launcher:
                own[name] = options.pop(name)
        places = find_places(devices, hosts=hosts, hostfile=hostfile)
        check_options_together(options, len(places))
        _check_number_of_places(rule, options, len(places))
        resume, are_here = options["resume"], all(is_here(place.host) for place in places)
        if isinstance(resume, str) and are_here and not os.path.exists(resume):
            raise FileNotFoundError(f"resume: there is no snapshot {resume!r} in {os.getcwd()}.")
        if settings is not None and not isinstance(settings, dict):
            raise TypeError(
                f"settings must be a dict of the model's settings, got {_wording.shown(settings)}."
            )
        checked = {name: _options.check_setting(name, v) for name, v in (settings or {}).items()}
        for name in ("agent", "mpirun_args"):
            value = reach.get(name, "")
            if not isinstance(value, str) and not (name == "agent" and value is None):
                raise TypeError(f"{name} must be a text, got {_wording.shown(value)}.")
        file = _modelfile.find(modelfile, modelclass)
        if are_here:
            _modelfile.check_packages(file, modelfile)
        names = rule, places, modelfile, modelclass
        return cls(*names, options, checked, reach=Options(**reach), **own)

    @property
    def ranks(self) -> list[RankPlace]:
        """The place of each rank; a server without a device is on the first host."""
        extra = self.options.get("server") == "extra"
        return [RankPlace(self.places[0].host, NO_DEVICE)] * extra + self.places

    @property
    def is_served(self) -> bool:
        """Whether rank 0 is a server, and not a worker."""
        return "server" in self.options

    @property
    def outlives_ranks(self) -> bool:
        """Whether workers go on after another one has died."""
        return self.rule not in _options.TOGETHER

    def job(self, cores: list[list[int] | None]) -> Job:
        """Return the job for the ranks."""
        devices = [place.device for place in self.ranks]
        names = (self.rule, self.modelfile, self.modelclass)
        return Job(*names, devices, cores, self.options, self.settings)

    def arguments(self, **changed: Any) -> list[str]:
        """Return the arguments of ``synkhronos rule`` for this request, with changed options."""
        line = [self.rule]
        for host, devices in by_host(self.places).items():
            line += ["--devices", f"{host}:{','.join(devices)}" if host else ",".join(devices)]
        line += [self.modelfile, self.modelclass]
        known = _options.of_rule(self.rule)
        values = {**self.options, "log_path": self.log_path, "grace": self.grace, **changed}
        for name, value in values.items():
            if value != known[name].default:
                line += [_options.flag(name), *([] if value is True else [str(value)])]
        line += ["--bind"] * self.bind
        for name, value in self.settings.items():
            line += ["--set", f"{name}={value!r}"]
        for name, value in asdict(self.reach).items():
            if value != getattr(Options, name):
                line += [f"{_options.flag(name)}={value}"]
        return line


def check_options_together(options: Mapping[str, Any], n_ranks: int) -> None:
    """Raise ValueError for options of BSP that don't go together."""
    if options.get("sync_type") == "cdd" and options["exchange_freq"] != 1:
        raise ValueError(
            "exchange_freq must be 1 with sync_type 'cdd', which sums the velocities of each step, "
            f"got {options['exchange_freq']}. With 'avg' ranks take steps of their own."
        )
    strategy = options["exch_strategy"]
    if options.get("sync_type") == "avg" and strategy.endswith("16") and n_ranks > 1:
        raise ValueError(
            f"exch_strategy {strategy!r} sends 16 bits, which is too few for the parameters that "
            "sync_type 'avg' sends: small steps would be lost. Take 'ar' or 'asa32'."
        )


def _check_number_of_places(rule, options, n_places):
    """Raise ValueError for too few devices, or a number that the options don't allow."""
    if options.get("server") == "first" and n_places == 1:
        raise ValueError(
            f"{rule} with one device: the first is the server's, so that no worker has one. Name "
            "two devices or more, or give the server a process without a device: server='extra'."
        )
    if options.get("sync_type") == "swap" and n_places % 2:
        raise ValueError(
            f"sync_type 'swap' pairs the ranks, so their number must be even, got {n_places}."
        )
