"""``device_facts``: the accelerators of all ranks and what carries their tensors, for the run's records."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lagom.accelerators import device_model
from lagom.device_models import DeviceModel, describe_differences

if TYPE_CHECKING:
    from lagom.session.session import Session


def device_facts(session: Session) -> dict[str, Any]:
    """Return the ``models`` of all ranks' accelerators, in rank order, and what carries tensors between them.

    If the models differ, rank 0 says so. A collective with several ranks.
    """
    models = _models_of_ranks(session)
    if session.rank == 0:
        by_rank = {f"rank {rank}": model for rank, model in enumerate(models)}
        if line := describe_differences(by_rank):
            session.say_once(line)
    facts: dict[str, Any] = {"models": [model.words for model in models]}
    if session.group is not None:
        facts["exchanges"] = session.group.device_group_class or "copies on the CPU"
    return facts


def _models_of_ranks(session: Session) -> list[DeviceModel]:
    own = device_model(session.device)
    if session.group is None:
        return [own]
    texts = session.group.all_gather_bytes(json.dumps(asdict(own)).encode())
    return [DeviceModel(**json.loads(text)) for text in texts]
