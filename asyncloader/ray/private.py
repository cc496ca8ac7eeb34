"""The private modules of Ray that asyncloader uses, and the versions of Ray that have them.

Ray has no public functions for what nodes have free, which nodes are drained, and files of a `runtime_env` that belongs
to no job. Another version of Ray may have changed the private ones, so `check_version` refuses it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from asyncloader.errors import ConfigurationError

log = logging.getLogger("asyncloader")

FIRST, END = (2, 60), (2, 61)
"""The first version of Ray that has what is used here, and the first that nobody has tested. As in pyproject.toml."""

KEPT_S = 600
"""Ray keeps files of a `runtime_env` for so long. Seconds."""


def check_version(version: str) -> None:
    """Raise a ConfigurationError for a version of Ray that workers on other machines do not work with."""
    if not FIRST <= tuple(map(int, re.findall(r"\d+", version)[:2])) < END:
        first, end = ("{}.{}".format(*bound) for bound in (FIRST, END))
        raise ConfigurationError(
            f"workers on other machines need a version of Ray from {first} on and below {end}, because they use its "
            f"private parts, but this is {version}: pip install 'ray>={first},<{end}'"
        )


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Return by id what the nodes that are alive have free, by Ray's names."""
    import ray
    from ray._private.state import available_resources_per_node

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {node: has for node, has in available_resources_per_node().items() if node in alive}


def draining_nodes() -> set[str]:
    """Return the ids of nodes that are about to be taken away."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def node_of(handle: Any) -> str:
    """Return the id of the node of an actor, also of one that has died; "" if it never had one."""
    from ray._private.state import state

    return str(state.actor_table(handle._actor_id.hex())["Address"]["NodeID"])


def pack(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Have Ray pack and store the files of this machine that a `runtime_env` names. Ray does so only for whole jobs.

    Raises:
        ConfigurationError: they are not there, or are too large for Ray.
    """
    if not runtime_env.get("working_dir") and not runtime_env.get("py_modules"):
        return runtime_env
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    made = dict(runtime_env)
    try:
        for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
            made = upload(made, include_gitignore=True, logger=log)
    except Exception as error:
        raise ConfigurationError(
            f"Ray cannot pack what RayWorkers(runtime_env=...) names for the nodes: {error} (leave out what they have "
            'or do not need by "excludes", or install it there)'
        ) from error
    made.pop("excludes", None)
    return made


def keep(runtime_env: Mapping[str, Any]) -> None:
    """Have Ray keep the stored files of a `runtime_env` for `KEPT_S` seconds more, because an agent may come later.

    Ray drops files that belong to no job when nobody has used them for ten minutes.
    """
    from ray._private.runtime_env.packaging import pin_runtime_env_uri

    for uri in (runtime_env.get("working_dir"), *(runtime_env.get("py_modules") or ())):
        if isinstance(uri, str) and uri.startswith("gcs://"):
            pin_runtime_env_uri(uri, expiration_s=KEPT_S)
