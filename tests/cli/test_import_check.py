"""A plug-in that hangs when it is imported."""

import pytest

from linvit import UserError
from linvit.cli.check import main
from linvit.cli.import_check import check_import
from linvit.registry import attentions, entries
from tests.plugin.distributions import write_distribution


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Installs it as `hanging`."""
    code = "import time\ntime.sleep(1000)\n"
    write_distribution(tmp_path, "linvit-hanging", "0.1", "[linvit.attentions]\nhanging = hang_:Mine\n", hang_=code)
    monkeypatch.syspath_prepend(tmp_path)
    entries.announced.cache_clear()
    yield
    entries.announced.cache_clear()


def test_it_is_named_when_its_time_is_up(hanging):
    said = r"attention 'hanging' of linvit-hanging 0.1 cannot be imported: its import takes more than 0.5 s"
    for name in ("hanging", "{name: hanging, option: 1}"):
        with pytest.raises(UserError, match=said):
            main([name, "--timeout", "0.5"])


def test_nothing_is_imported_for_other_names(hanging):
    for name in ("focused", "my_module:Mine", "unknown"):
        check_import(attentions, name, timeout=1e-9)
