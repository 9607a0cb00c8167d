"""The producer's promise as a property: any network, any crash, and still exactly once in order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fencepost.client.errors import ConnectionFailedError, StaleEpochError, UnavailableError
from tests.unit.client.model import ModelServer, Session, Wired, unavailable


class ProducerOnABadNetwork(RuleBasedStateMachine):
    """Every message of every session is stored at most once, in order, without a hole before it;
    acknowledged means stored; refused means not stored; the last session loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.server = ModelServer()
        self.sessions: list[Session] = []
        self.adrift: list[list[Wired]] = []
        self.delivered: list[Wired] = []

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    @initialize(predecessor=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 4)))
    def begin(self, predecessor: tuple[int, int] | None) -> None:
        if predecessor is not None:
            epoch, last = predecessor
            for seq in range(last + 1):
                assert self.server.take(Wired(epoch, seq, None, b"[[-1,%d]]" % seq)).status == 200
        self.sessions.append(Session(0, self.server))

    @precondition(lambda self: self.session.machine.failure is None)
    @rule(count=st.integers(1, 8))
    def append(self, count: int) -> None:
        for _ in range(count):
            self.session.append()
        self.session.pump()

    @rule()
    def flush(self) -> None:
        self.session.machine.flush()
        self.session.pump()

    @rule(requests=st.integers(0, 6), answers=st.integers(0, 6))
    def things_move(self, requests: int, answers: int) -> None:
        session = self.session
        session.now += 2.0
        session.pump()
        for _ in range(min(requests, len(session.to_server))):
            self.delivered.append(session.deliver_request())
        for _ in range(min(answers, len(session.to_client))):
            session.deliver_answer()
        session.pump()

    @precondition(lambda self: any(session.to_server for session in self.sessions))
    @rule(data=st.data())
    def a_request_arrives(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s in self.sessions if s.to_server]))
        self.delivered.append(session.deliver_request())

    @precondition(lambda self: self.session.to_server)
    @rule(stores=st.booleans())
    def a_request_fails_on_the_server(self, stores: bool) -> None:
        if stores:
            self.delivered.append(self.session.deliver_request())
            self.session.to_client[-1] = unavailable()
        else:
            self.session.to_server.popleft()
            self.session.to_client.append(unavailable())

    @precondition(lambda self: any(session.to_client for session in self.sessions))
    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s in self.sessions if s.to_client]))
        session.deliver_answer()
        session.pump()

    @precondition(lambda self: self.session.up)
    @rule(still_under_way=st.booleans())
    def the_connection_breaks(self, still_under_way: bool) -> None:
        undelivered = self.session.lose()
        if still_under_way and undelivered:
            self.adrift.append(undelivered)
        self.session.pump()

    @precondition(lambda self: self.adrift)
    @rule(data=st.data())
    def what_was_adrift_arrives(self, data: st.DataObject) -> None:
        requests = data.draw(st.sampled_from(self.adrift))
        wired = requests.pop(0)
        if not requests:
            # By identity: two strays may hold equal requests.
            self.adrift = [other for other in self.adrift if other is not requests]
        self.server.take(wired)
        self.delivered.append(wired)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def an_old_request_arrives_again(self, data: st.DataObject) -> None:
        self.server.take(data.draw(st.sampled_from(self.delivered)))

    @rule(seconds=st.sampled_from([0.01, 0.5, 5.0, 31.0, 121.0]))
    def time_passes(self, seconds: float) -> None:
        for session in self.sessions:
            session.now += seconds
        self.session.pump()

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(old_lives_on=st.booleans())
    def the_producer_restarts(self, old_lives_on: bool) -> None:
        old = self.session
        if not old_lives_on and old.up:
            old.lose()
        self.sessions.append(Session(len(self.sessions), self.server))

    @invariant()
    def nothing_is_stored_twice_or_out_of_order_or_behind_a_hole(self) -> None:
        for session in self.sessions:
            stored = [index for number, index in self.server.stored if number == session.number]
            assert stored == list(range(len(stored)))

    @invariant()
    def acknowledged_is_stored_and_refused_is_not(self) -> None:
        stored = {(number, index) for number, index in self.server.stored}
        for session in self.sessions:
            assert stored.issuperset((n, i) for n, i in session.acknowledged)
            assert stored.isdisjoint((n, i) for n, i in session.refused)

    def teardown(self) -> None:
        if not self.sessions:
            return
        last = self.session
        last.machine.close(0.0)
        last.settle()
        for requests in self.adrift:
            for wired in requests:
                self.server.take(wired)
        self.nothing_is_stored_twice_or_out_of_order_or_behind_a_hole()
        self.acknowledged_is_stored_and_refused_is_not()
        told = len(last.acknowledged) + len(last.refused) + len(last.unknown)
        assert told == last.appended
        assert last.machine.pending_bytes == 0
        if last.machine.failure is None:
            assert len(last.acknowledged) == last.appended
        for session in self.sessions:
            self._failed_for_a_reason(session)

    def _failed_for_a_reason(self, session: Session) -> None:
        """Only a newer session or too much time may end a producer in this world."""
        if session.machine.failure is None:
            return
        cause = session.machine.failure.cause
        if isinstance(cause, StaleEpochError):
            assert len(self.sessions) > 1
        else:
            assert isinstance(cause, ConnectionFailedError | UnavailableError)
            assert session.now >= 120.0


TestProducerOnABadNetwork = ProducerOnABadNetwork.TestCase
TestProducerOnABadNetwork.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None
)
