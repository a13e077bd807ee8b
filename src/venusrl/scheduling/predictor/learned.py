"""The learned predictor: gradient-boosted corrections of the sibling heuristic, calibrated, watched, replaceable.

Owns: ``Learned``: when forecasts are kept, what a model is fitted to, whose answer counts. Must not know: which library
fits (``Regressor``), policies.

What is learned is the quotient of the true remaining turns and the heuristic's quantile, at checkpoints of every
trajectory. The heuristic follows a shift of lengths within the turns after it; the model only adds what features say
beyond it, and nothing where they say nothing. Unfinished trajectories, running or cancelled, are among the examples:
their remaining length is drawn from the heuristic's distribution *beyond what they have already survived*, and counts
as much as that survival says. The examples are the trajectories opened last, finished or not; to take those finished
last would prefer short ones while a run is young.

Everything said is calibrated (``calibration``) and scored when its trajectory ends (``scores``); when the model ranks
worse than the heuristic over these, the heuristic answers, and the model is fitted anew, until it ranks better again.
"""

from __future__ import annotations

import math
import statistics
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from venusrl.scheduling.events import Event
from venusrl.scheduling.predictor import Forecast, Gap, Predictor, Quality, Spread, StateError, slowest
from venusrl.scheduling.predictor.boosting import Boosting
from venusrl.scheduling.predictor.calibration import LEVELS, corrected, factors, outcome
from venusrl.scheduling.predictor.features import NAMES, features
from venusrl.scheduling.predictor.forest import Forest, Regressor
from venusrl.scheduling.predictor.ranks import kendall
from venusrl.scheduling.predictor.scores import Scored, Scores, Switch
from venusrl.scheduling.predictor.siblings import Limits, Siblings, decode_state
from venusrl.scheduling.predictor.tracks import Checkpoint, Family, Track

_FORMAT = 1
_SPACING = 1.4
_UNITS = (0.0, 1.0, 1.0, 0.1)
"""Of turns, tokens, context, tool seconds: below it a quantity is as good as nothing."""
_SCORED_EACH = 6
"""Forecasts of one trajectory that are scored."""
_IMPUTED = (0.3, 0.4, 0.3)
"""Weights of the three quantiles that stand for a length that is not known yet."""
_KEPT_WITH_RUN = 512
_BLOCK = 64
_CHANCE = 0.2
"""Mean log errors of blocks of examples, and their medians, differ by about so much by chance."""
Shifts = tuple[tuple[float, ...], ...]
_NO_SHIFT: Shifts = ((0.0, 0.0, 0.0),) * 4


class LearnedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts are of trajectories that ended, unless said otherwise."""

    half_life: float = 256.0
    """After so many an observation counts half, for the heuristic and the model."""
    window: int = 1024
    """Examples: those opened last, beside the running ones."""
    scores: int = 256
    """Over how many forecasts are judged. At most a training step's worth, so that a shift shows within one."""
    first_fit: int = 64
    """After so many forecasts are kept, after twice as many the first model is fitted."""
    refit_every: int = 128
    """At the least; later when a quarter more than at the last fit are known."""
    look_every: int = 64
    """How often calibration and the choice of forecaster are renewed."""
    rows: int = 6000
    """Checkpoints to fit to, at most."""
    kept_running: int = 1024
    """Running trajectories whose checkpoints are kept; of more than that, a sample."""
    inline: bool = True
    """Whether ``observe`` itself refits when it is due. Off: the owner does, through ``refit`` or in a thread through
    ``prepare``, ``Job.run`` and ``adopt``."""

    def __post_init__(self) -> None:
        for name in ("window", "scores", "first_fit", "refit_every", "look_every", "rows", "kept_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


class Job(NamedTuple):
    """Examples, taken out so that a thread may fit them while events go on."""

    regressor: Regressor
    rows: list[array[float]]
    values: tuple[list[float], ...]
    """For each level the logarithm of true remaining turns over the heuristic's quantile."""
    weights: list[float]

    def run(self) -> tuple[Forest, ...]:
        """The slow part: about 0.1 s a thousand rows, on one core."""
        pairs = zip(LEVELS, self.values, strict=True)
        return tuple(self.regressor.fit(self.rows, values, self.weights, level) for level, values in pairs)


class Learned(Predictor):
    """See the module."""

    name = "learned"

    def __init__(
        self, limits: Limits | None = None, config: LearnedConfig | None = None, regressor: Regressor | None = None
    ) -> None:
        self.config = LearnedConfig() if config is None else config
        self.siblings = Siblings(limits, half_life=self.config.half_life)
        self._regressor: Regressor = Boosting() if regressor is None else regressor
        self._forests: tuple[Forest, ...] = ()
        self._examples: deque[Track] = deque()
        self._scores = Scores(self.config.scores)
        self._switch = Switch()
        self._shifts: dict[str, Shifts] = {"siblings": _NO_SHIFT, "learned": _NO_SHIFT}
        self._looks = self._fits = 0
        self._ended = self._looked_at = self._fitted_at = self._known_at_fit = 0
        self._asked = False

    # --- learning ----------------------------------------------------------------------------------------
    def observe(self, event: Event, now: float) -> None:
        seen = self.siblings.take(event, now)
        if seen is None:
            return
        track = seen.track
        match seen.what:
            case "started" | "went_on":
                if track.turns >= track.next_checkpoint:
                    self._checkpoint(track)
            case "ended":
                self._ended += 1
                if track.checkpoints:
                    self._scores.add(tuple(self._scored(track)))
                if self.config.inline:
                    self.refit()
            case _:
                pass

    def _checkpoint(self, track: Track) -> None:
        """Have the model look at the trajectory, and keep what is said now for when it ends."""
        siblings = self.siblings
        belief = siblings.belief(track.family)
        turns = siblings.turns(track, belief)
        row = features(siblings, track, belief, turns)
        track.next_checkpoint = max(track.turns + 1, int(track.turns * _SPACING))
        if self._forests:
            track.correction = tuple(forest.predict(row) for forest in self._forests)
        heuristic = siblings.paced(track, belief, turns)
        if self._ended < self.config.first_fit or not self._kept(track):
            # What the heuristic says before it has seen anything tells nothing of what it will say.
            return
        if not track.checkpoints:
            self._examples.append(track)
            while len(self._examples) > self.config.window + min(siblings.tracks.running, self.config.kept_running):
                self._examples.popleft()
        model = self._by_model(track, heuristic) if track.correction is not None else None
        given = self._given(track, heuristic, model)
        track.checkpoints.append(
            Checkpoint(row, track.had(), _flat(heuristic), None if model is None else _flat(model), _flat(given))
        )

    def _kept(self, track: Track) -> bool:
        share = -(-self.siblings.tracks.running // self.config.kept_running)
        return bool(track.checkpoints) or zlib.crc32(track.name.encode()) % max(1, share) == 0

    def _scored(self, track: Track) -> Iterator[Scored]:
        every = -(-len(track.checkpoints) // _SCORED_EACH)
        for said in track.checkpoints[zlib.crc32(track.name.encode()) % every :: every]:
            actual = _since(track, said)
            model = None if said.model is None else said.model[1]
            yield Scored(actual, said.heuristic[1], model, said.given[0] <= actual <= said.given[2])

    # --- refitting ----------------------------------------------------------------------------------------
    def refit(self) -> bool:
        """Calibrate and choose, and fit, each if it is due."""
        looked = self.look()
        job = self.prepare()
        if job is None:
            return looked
        self.adopt(job.run())
        return True

    def look(self) -> bool:
        """Renew calibration and the choice of forecaster, if that is due (tens of milliseconds)."""
        if self._ended - self._looked_at < self.config.look_every:
            return False
        self._looked_at = self._ended
        self._looks += 1
        before = self._switch.learned
        self._switch.look(self._scores.compare())
        self._asked = self._asked or (before and not self._switch.learned)
        self._shifts = {"siblings": self._factors(model=False), "learned": self._factors(model=True)}
        return True

    def prepare(self) -> Job | None:
        """What to fit now; None if that is not due. Pass ``Job.run``'s answer to ``adopt``."""
        fresh = self._ended - self._fitted_at
        if self._fitted_at == 0:
            due = self._ended >= 2 * self.config.first_fit
        else:
            due = fresh >= max(self.config.refit_every, min(self._known_at_fit // 4, 4 * self.config.refit_every))
            due = due or (self._asked and fresh >= self.config.look_every)
        if not due or sum(t.ended and not t.lost for t in self._examples) < self.config.first_fit:
            return None
        self._asked = False
        self._fitted_at, self._known_at_fit = self._ended, self._ended
        return self._job()

    def adopt(self, forests: Sequence[Forest]) -> None:
        """Answer by these from now on."""
        for forest in forests:
            forest.check(len(NAMES))
        self._forests = tuple(forests)
        self._fits += 1

    def _job(self) -> Job:
        rows: list[array[float]] = []
        values: tuple[list[float], ...] = ([], [], [])
        weights: list[float] = []
        youngest = self.siblings.tracks.opened
        every = max(1, sum(len(t.checkpoints) for t in self._examples) // self.config.rows)
        for track, lag in zip(self._examples, self._lags(), strict=True):
            recent = 2.0 ** ((track.opened - youngest) / self.config.half_life)
            left = None if track.ended and not track.lost else self._left(track)
            for said in track.checkpoints[track.opened % every :: every]:
                for actual, weight in self._labels(track, said, left):
                    rows.append(said.features)
                    weights.append(weight * recent)
                    for level, forecast in enumerate(said.heuristic[:3]):
                        values[level].append(math.log(actual / forecast) - lag)
        return Job(self._regressor, rows, values, weights)

    def _lags(self) -> list[float]:
        """By how much the heuristic was out for each example because lengths were shifting and it had yet to follow.

        What it has since made good must be neither learned nor calibrated for: that would correct it twice. A block of
        examples that is out by much more than the others is taken to be such.
        """
        errors = [self._error(track) for track in self._examples]
        blocks = [errors[i : i + _BLOCK] for i in range(0, len(errors), _BLOCK)]
        means = [math.fsum(block) / len(block) for block in blocks]
        usual = statistics.median(means) if means else 0.0
        lags = [math.copysign(max(0.0, abs(mean - usual) - _CHANCE), mean - usual) for mean in means]
        return [lag for lag, block in zip(lags, blocks, strict=True) for _ in block]

    def _error(self, track: Track) -> float:
        """The logarithm of a trajectory's true remaining turns over the heuristic's median, when it was first kept."""
        said = track.checkpoints[0]
        left = 0.0 if track.ended and not track.lost else self._left(track).p50
        since = _since(track, said) if left == 0.0 else track.turns - said.had[0]
        return math.log((since + left) / said.heuristic[1])

    def _left(self, track: Track) -> Spread:
        """What is believed to be left of one whose end is not known."""
        return self.siblings.turns(track, self.siblings.belief(track.family))

    def _labels(self, track: Track, said: Checkpoint, left: Spread | None) -> Iterator[tuple[float, float]]:
        """Remaining turns at the checkpoint, with weights that sum to at most 1."""
        if left is None:
            yield _since(track, said), 1.0
            return
        since = track.turns - said.had[0]
        lengths = self.siblings.lengths
        told = 1.0 - lengths.survival(track.turns) / max(1e-12, lengths.survival(said.had[0]))
        if told > 0.05:
            for more, weight in zip(left, _IMPUTED, strict=False):
                yield since + more, weight * told

    def _factors(self, *, model: bool) -> Shifts:
        """Calibration of the heuristic or of the model, by one forecast of each of the newest trajectories."""
        newest = self.config.scores + min(self.siblings.tracks.running, self.config.kept_running)
        found: list[list[list[Any]]] = [[[] for _ in LEVELS] for _ in _UNITS]
        for track, lag in list(zip(self._examples, self._lags(), strict=True))[-newest:]:
            said = track.checkpoints[zlib.crc32(track.name.encode()) % len(track.checkpoints)]
            forecast = said.model if model else said.heuristic
            if forecast is None:
                continue
            known = track.ended and not track.lost
            for i, (had, has, unit) in enumerate(zip(said.had, track.had(), _UNITS, strict=True)):
                actual = has - had if i else _since(track, said)
                for level in range(3):
                    found[i][level].append(outcome(actual, forecast[3 * i + level], unit, lag, known=known))
        return tuple(_settled(factors(one)) for one in found)

    # --- answers ------------------------------------------------------------------------------------------
    def forecast(self, trajectory: str) -> Forecast:
        return self._of(self.siblings.tracks.live[trajectory])

    def _of(self, track: Track) -> Forecast:
        heuristic = self.siblings.kept(track)
        if track.ended:
            return heuristic
        kept = track.given
        if kept is not None and kept[0] is heuristic and kept[1] is track.correction and kept[2] == self._looks:
            found: Forecast = kept[3]
            return found
        learned = self._switch.learned and track.correction is not None
        found = self._given(track, heuristic, self._by_model(track, heuristic) if learned else None)
        track.given = (heuristic, track.correction, self._looks, found)
        return found

    def _by_model(self, track: Track, heuristic: Forecast) -> Forecast:
        """The heuristic's forecast with the model's correction of turns, before calibration."""
        if track.correction is None:
            return heuristic
        turns = corrected(heuristic.turns, track.correction, 0.0)
        turns = self._bounded(track.turns, turns._replace(mean=turns.mean * math.exp(track.correction[1])))
        belief = self.siblings.belief(track.family)
        return self.siblings.paced(track, belief, turns)._replace(source="learned")

    def _bounded(self, played: float, turns: Spread) -> Spread:
        cap = self.siblings.limits.max_turns
        most = math.inf if cap is None else max(1.0, cap - played)
        return Spread(*(min(most, max(1.0, n)) for n in turns))

    def _given(self, track: Track, heuristic: Forecast, model: Forecast | None) -> Forecast:
        """Whichever counts, calibrated."""
        chosen = model if model is not None and self._switch.learned else heuristic
        shifts, (turn, token, _, second) = self._shifts[chosen.source], _UNITS
        return Forecast(
            turns=self._bounded(track.turns, corrected(chosen.turns, shifts[0], turn)),
            tokens=corrected(chosen.tokens, shifts[1], token),
            context=corrected(chosen.context, shifts[2], token),
            tool_s=corrected(chosen.tool_s, shifts[3], second),
            verify_s=chosen.verify_s,
            source=chosen.source,
        )

    def gap(self, trajectory: str, now: float) -> Gap:
        return self.siblings.gap(trajectory, now)

    def group(self, group: str) -> Forecast:
        members = self.siblings.tracks.families[group].members.values()
        return slowest(self._of(track) for track in members if track.phase != "finished")

    def quality(self) -> Quality:
        by_rank, by_pairs = self._scores.compare(), self._scores.compare(kendall)
        learned = self._switch.learned
        return Quality(
            active="learned" if learned else "siblings",
            trajectories=len(self._scores),
            spearman=by_rank.model if learned else self._scores.fallback(),
            kendall=by_pairs.model if learned else self._scores.fallback(kendall),
            coverage=self._scores.coverage(),
            fallback_spearman=by_rank.heuristic if learned else self._scores.fallback(),
            fallback_kendall=by_pairs.heuristic if learned else self._scores.fallback(kendall),
            switches=self._switch.flips,
            refits=self._fits,
        )

    # --- keeping -------------------------------------------------------------------------------------------
    def state(self) -> bytes:
        ended = [track for track in self._examples if track.ended and not track.lost][-_KEPT_WITH_RUN:]
        kept = {
            "format": _FORMAT,
            "predictor": "learned",
            "features": NAMES,
            "siblings": self.siblings.state(),
            "forests": self._forests,
            "examples": [_packed(track) for track in ended],
            "scores": self._scores.state(),
            "learned": self._switch.learned,
            "flips": self._switch.flips,
            "shifts": self._shifts,
            "counts": [self._ended, self._looked_at, self._fitted_at, self._known_at_fit, self._fits],
        }
        return msgspec.msgpack.encode(kept)

    def load(self, state: bytes) -> None:
        kept = decode_state(state, "learned", _FORMAT)
        if tuple(kept.get("features", ())) != NAMES:
            raise StateError("the predictor's state is of a release with other features")
        try:
            self.siblings.load(kept["siblings"])
            forests = msgspec.convert(kept["forests"], tuple[Forest, ...])
            for forest in forests:
                forest.check(len(NAMES))
            self._forests = forests
            self._examples = deque(_unpacked(one) for one in kept["examples"])
            self.siblings.tracks.opened = max((t.opened + 1 for t in self._examples), default=0)
            self._scores.load(kept["scores"])
            self._switch.learned, self._switch.flips = bool(kept["learned"]), int(kept["flips"])
            self._shifts = {name: tuple(map(tuple, shifts)) for name, shifts in kept["shifts"].items()}
            self._ended, self._looked_at, self._fitted_at, self._known_at_fit, self._fits = kept["counts"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the predictor's state is damaged: {error!r}") from error


def _since(track: Track, said: Checkpoint) -> float:
    """Turns from a checkpoint to the end (or to now). One that was asked for and never finished was a turn too."""
    return max(1.0, track.turns - said.had[0])


def _settled(shifts: tuple[float, ...]) -> tuple[float, ...]:
    """The median moves only by what chance does not explain: its jitter would order forecasts of different moments."""
    low, middle, high = shifts
    return low, math.copysign(max(0.0, abs(middle) - _CHANCE), middle), high


def _packed(track: Track) -> list[Any]:
    said = [[c.features.tobytes(), c.had, c.heuristic, c.model, c.given] for c in track.checkpoints]
    return [track.name, track.opened, track.turns, track.tokens, track.prompt, track.tool_s, said]


def _unpacked(kept: list[Any]) -> Track:
    name, opened, turns, tokens, prompt, tool_s, said = kept
    track = Track(name, Family("", "", 0), opened, phase="finished", turns=turns, first=0, ended=True)
    track.tokens, track.prompt, track.tool_s = tokens, prompt, tool_s
    for features_, had, heuristic, model, given in said:
        row = array("f")
        row.frombytes(features_)
        if len(row) != len(NAMES):
            raise ValueError(f"an example of {len(row)} features")
        seen = None if model is None else tuple(model)
        track.checkpoints.append(Checkpoint(row, tuple(had), tuple(heuristic), seen, tuple(given)))
    return track


def _flat(forecast: Forecast) -> tuple[float, ...]:
    """Three quantiles each of turns, tokens, context and tool seconds."""
    return (*forecast.turns[:3], *forecast.tokens[:3], *forecast.context[:3], *forecast.tool_s[:3])
