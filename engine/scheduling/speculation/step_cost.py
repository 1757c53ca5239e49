"""The time of a decode step as a function of its tokens, measured while the engine runs."""

from __future__ import annotations

_WEIGHT = 0.02
"""The weight of the newest step in the moving averages."""
_PRIOR_TOKENS = 16.0
"""Prior: until steps of different sizes have run, this many tokens double a step's time."""
_LEAST_SLOPE = 0.25
"""Lower bound as a factor of the prior: a step that was slow for other reasons must not make tokens free."""
_MOST_OF_MEAN = 4.0
"""Upper bound as a factor of the mean: time beyond it was not caused by the step's tokens."""
_PRIOR_STRENGTH = 1.0
"""The variance of step sizes, in tokens squared, at which measurements weigh as much as the prior."""


class StepCost:
    """A line through the steps' times, seconds = base + slope * tokens: weighted least squares with a prior slope."""

    def __init__(self) -> None:
        self._num_observed = 0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        if self._num_observed:
            seconds = min(seconds, _MOST_OF_MEAN * self._mean_seconds)
        self._num_observed += 1
        weight = max(_WEIGHT, 1.0 / self._num_observed)
        tokens, time = num_tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += weight * tokens
        self._mean_seconds += weight * time
        self._variance += weight * ((1.0 - weight) * tokens * tokens - self._variance)
        self._covariance += weight * ((1.0 - weight) * tokens * time - self._covariance)

    @property
    def slope(self) -> float:
        """Seconds that one more token adds to a step."""
        prior = self._mean_seconds / (_PRIOR_TOKENS + self._mean_tokens)
        measured = self._covariance + _PRIOR_STRENGTH * prior
        return max(_LEAST_SLOPE * prior, measured / (self._variance + _PRIOR_STRENGTH))

    def seconds(self, num_tokens: int) -> float:
        slope = self.slope
        return max(slope * num_tokens, self._mean_seconds + slope * (num_tokens - self._mean_tokens))
