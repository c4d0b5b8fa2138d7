"""Lines of an actor of Ray that are written only if it goes on. Needs no Ray."""

import logging
import threading

from paged.ray import late_lines


def test_a_line_is_written_once_its_time_has_come(monkeypatch, caplog):
    waiting = []

    class Timer(threading.Thread):
        def __init__(self, seconds, function, arguments):
            super().__init__(target=function, args=arguments)
            assert seconds == late_lines.LATE_S

        def start(self):
            assert self.daemon  # an actor that ends does not wait for it
            waiting.append(self)

    monkeypatch.setattr(late_lines.threading, "Timer", Timer)
    logger = logging.getLogger("tests.late_lines")
    filtered = late_lines.LateLines(logger)
    try:
        for name in ("one", "two"):
            logger.error("engine process %s has ended", name)
        assert caplog.messages == []
        for timer in waiting:
            timer.run()
    finally:
        logger.removeFilter(filtered)
    assert caplog.messages == ["engine process one has ended", "engine process two has ended"]
