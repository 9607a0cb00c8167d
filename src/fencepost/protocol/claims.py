"""Who holds a producer id, who may go on or take it over, and what of that is audited.

A *claim* is the accepted append that opens or retakes a producer id under the configured globs. It
is open until its holder says that it is released or completed, or another principal's raise takes
it away, which counts as abandoned. All of this is about requests with an `Actor`: without
authorization there is none, and nothing here is asked.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from fencepost.protocol.grants import Principal, ProducerRule
from fencepost.protocol.rates import NEW, Standing, TooFast, decide_claim_pace, ended
from fencepost.protocol.streams import CLAIMED, COMPLETED, RELEASED, UNCLAIMED, Producer

Ending = Literal["released", "completed"]


class Actor(msgspec.Struct, frozen=True, gc=False):
    """A principal in one request, with what it says beside the request itself."""

    principal: Principal
    reason: str = ""
    """Why, for the audit stream (Audit-Reason)."""
    overrides: bool = False
    """An administrator who gave a reason: the rules for producer ids do not hold it up."""
    ending: Ending | None = None
    """With this append the holder gives the claim up (Claim-End)."""

    @property
    def name(self) -> str:
        return self.principal.name


class NotHolder(NamedTuple):
    """Another principal holds this epoch, and only its holder may go on in it."""


class EpochGuarded(NamedTuple):
    """The epoch may not be raised: never (None), or not before the holder counts as gone."""

    retry_after_ms: int | None


class ClaimCompleted(NamedTuple):
    """The holder completed this claim, so its producer id accepts nothing further."""


class Step(NamedTuple):
    """Whether an accepted append claims its producer id, and whether it raises the epoch."""

    claims: bool
    raises: bool


def refuse(
    actor: Actor, producer: Producer | None, epoch: int, *, producer_id: str, now_ms: int
) -> NotHolder | EpochGuarded | None:
    """Why `actor` may not send a new batch in `epoch`; None when it may."""
    if producer is None or actor.overrides:
        return None
    return _refusal(actor, producer, epoch, actor.principal.rules.rule(producer_id), now_ms)


def is_completed(actor: Actor, producer: Producer, epoch: int) -> bool:
    """Whether a new batch comes too late for a claim: only an administrator opens it again."""
    reopens = actor.overrides and epoch > producer.epoch
    return producer.claim == COMPLETED and not reopens


def _refusal(
    actor: Actor, producer: Producer, epoch: int, rule: ProducerRule, now_ms: int
) -> NotHolder | EpochGuarded | None:
    # An epoch that was opened before there were principals has no holder, like a released one.
    free = producer.claim == RELEASED or not producer.principal
    if epoch == producer.epoch:
        mine = rule.shared or free or producer.principal == actor.name
        return None if mine else NotHolder()
    if rule.raising == "always":
        return None
    if rule.raising == "never" or producer.claim == COMPLETED:
        return EpochGuarded(None)
    left_ms = producer.updated_ms + rule.stale_after_ms - now_ms
    return None if left_ms <= 0 or producer.claim == RELEASED else EpochGuarded(left_ms)


def held(actor: Actor, before: Producer | None, after: Producer) -> Producer:
    """The producer that an accepted append leaves, with who holds it and in which state."""
    if (
        actor.ending is None
        and before is not None
        and before.epoch == after.epoch
        and after.principal
        and after.claim != RELEASED
    ):
        return after  # it only goes on, as nearly always
    rule = actor.principal.rules.rule(after.id)
    opens = before is None or before.epoch != after.epoch
    owner, claim = after.principal, after.claim
    if opens or not owner or claim == RELEASED:
        owner, claim = actor.name, CLAIMED if rule.is_claim else UNCLAIMED
    if actor.ending is not None and rule.is_claim:
        claim = RELEASED if actor.ending == "released" else COMPLETED
    return msgspec.structs.replace(after, principal=owner, claim=claim)


def step_of(actor: Actor, before: Producer | None, after: Producer) -> Step:
    """Whether an accepted append claims and whether it raises."""
    raises = before is not None and after.epoch != before.epoch
    opens = before is None or raises
    retakes = opens or (before is not None and _is_retaken(before, after))
    return Step(actor.principal.rules.rule(after.id).is_claim and retakes, raises)


def _is_retaken(before: Producer, after: Producer) -> bool:
    return before.claim in (RELEASED, UNCLAIMED) and (
        before.principal != after.principal or before.claim != after.claim
    )


def is_same_hold(before: Producer | None, after: Producer) -> bool:
    """Whether an append only goes on: no claim begins or ends with it."""
    return (
        before is not None
        and before.epoch == after.epoch
        and before.claim == after.claim
        and before.principal == after.principal
    )


Standings = dict[str, Standing]


def decide_standings(
    standings: Standings, actor: Actor, before: Producer | None, after: Producer, now_ms: int
) -> Standings | TooFast:
    """Standings of principals after an append that would be accepted; only those that change."""
    if is_same_hold(before, after):
        return {}
    step = step_of(actor, before, after)
    changed: Standings = {}
    if before is not None and before.claim == CLAIMED:
        over = step.claims or after.claim != CLAIMED
        if over:
            standing = standings.get(before.principal, NEW)
            changed[before.principal] = ended(standing, abandoned=step.raises, now_ms=now_ms)
    if step.claims or step.raises:
        standing = changed.get(actor.name, standings.get(actor.name, NEW))
        paced = decide_claim_pace(
            standing,
            actor.principal.pace,
            claims=step.claims,
            raises=step.raises,
            now_ms=now_ms,
        )
        if isinstance(paced, TooFast):
            return paced
        if step.claims and after.claim != CLAIMED:
            paced = ended(paced, abandoned=False, now_ms=now_ms)  # over as soon as made
        changed[actor.name] = paced
    return changed


class AuditEvent(NamedTuple):
    """Something that the audit stream tells."""

    kind: str
    """`epoch_raised`, `override`, `refused`, or what an operator did to a group."""
    at_ms: int
    principal: str
    stream: str
    producer: str
    old_epoch: int | None
    new_epoch: int
    holder: str
    reason: str
    code: str | None = None
    targets: tuple[str, ...] | None = None
    """The targets of a group that an operator changed."""


def audit(
    actor: Actor,
    stream: str,
    epoch: int,
    producer_id: str,
    before: Producer | None,
    refusal: NotHolder | EpochGuarded | None,
    now_ms: int,
) -> AuditEvent | None:
    """What is to be told of an append that was accepted, or refused by the rules above."""
    if before is None or (refusal is None and epoch == before.epoch and not actor.overrides):
        return None
    rule = actor.principal.rules.rule(producer_id)
    code: str | None = None
    kind: Literal["epoch_raised", "override", "refused"]
    if refusal is not None:
        kind = "refused"
        code = "producer_held" if isinstance(refusal, NotHolder) else "epoch_guarded"
    elif actor.overrides and _refusal(actor, before, epoch, rule, now_ms) is not None:
        kind = "override"
    elif epoch != before.epoch:
        kind = "epoch_raised"
    else:
        return None
    return AuditEvent(
        kind,
        now_ms,
        actor.name,
        stream,
        producer_id,
        before.epoch,
        epoch,
        before.principal,
        actor.reason,
        code,
    )
