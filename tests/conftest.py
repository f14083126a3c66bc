"""Settings of the whole suite."""

from hypothesis import settings

# The same examples on every run, and no deadline: a busy machine is not a failure.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
