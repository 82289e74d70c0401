"""The program of the process that runs chat templates within limits of memory and time.

Templates are untrusted: Jinja's sandbox denies them files and Python's internals, but not endless loops and
huge texts. `chat_template.py` starts this program.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

# Noncharacters of Unicode, which are for a program's own use: here they enclose the assistant's answers.
BEGIN, END = "\ufdd0", "\ufdd1"
_SHOWN = 1000  # characters of an error message


@functools.cache
def _environment() -> Any:
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tags that some templates put around the assistant's answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = _as_json
    return environment


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


def _answer(source: str, values: dict[str, Any], date: str | None) -> dict[str, Any]:
    if date is not None:
        day = datetime.datetime.fromisoformat(date)
        values = {**values, "strftime_now": lambda shape: day.strftime(shape)}
    try:
        compiled = _compile(source)
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # Jinja also evaluates constants while it compiles
        return {"line": getattr(error, "lineno", 1), "error": str(error)[:_SHOWN]}
    try:
        return {"text": compiled.render(**values)}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # templates can raise anything
        return {"error": str(error)[:_SHOWN]}


def main(descriptor: int, memory: int, seconds: int) -> None:
    """Answers requests from a connection with JSON until its other end is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        signal.alarm(2 * seconds)  # ends this process if the one that asked no longer exists to do so
        try:
            answer = json.dumps(_answer(*request)).encode()
        except MemoryError:
            answer = b'{"limit": "memory"}'
        signal.alarm(0)
        connection.send_bytes(answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
