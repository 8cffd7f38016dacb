"""The HTTP application. Owns: routes, and the order of checks on a generation request.

`create_app` builds on parts that the composition root made; extra routers (metrics, observation) are passed in, because
the engine does not know them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine.clock import Clock, MonotonicClock
from engine.config import ServerConfig
from engine.errors import EngineDead, RequestRefused
from engine.server.api_errors import ApiError, error_body, from_refusal, invalid, unavailable
from engine.server.body import read_body
from engine.server.engine_thread import EngineThread
from engine.server.gate import Gate
from engine.server.health import Health, liveness, readiness
from engine.server.intake import Intake, ServedModel, num_choices, take_in
from engine.server.observer import FrontEndObserver, NullObserver
from engine.server.openapi import document, operation, refusals
from engine.server.render import Envelope
from engine.server.schemas import ChatCompletionBody, CompletionBody, GenerationBody, parse_body
from engine.server.streaming import GenerationResponse
from engine.server.trace_context import RequestContext
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer


class FrontEnd:
    """The handlers of one application."""

    def __init__(
        self,
        *,
        engine_thread: EngineThread,
        tokenizer: Tokenizer,
        model: ServedModel,
        config: ServerConfig,
        grammars: Grammars | None,
        clock: Clock,
        observer: FrontEndObserver,
    ) -> None:
        self._engine_thread = engine_thread
        self._tokenizer = tokenizer
        self._model = model
        self._config = config
        self._grammars = grammars
        self._clock = clock
        self._observer = observer

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletionBody)

    async def models(self) -> dict[str, Any]:
        """Every served model: one."""
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model; 404 for another."""
        if name != self._model.name:
            raise ApiError(404, f"the model {name[:100]!r} is not served here", code="model_not_found", param="model")
        return self._model_card()

    async def health(self) -> Response:
        """200 while the engine is alive."""
        return _probe(liveness(self._engine_thread.status, self._clock.now_ns(), self._config.stall_after_s))

    async def ready(self) -> Response:
        """200 while the engine is alive and takes requests."""
        config = self._config
        now_ns = self._clock.now_ns()
        return _probe(readiness(self._engine_thread.status, now_ns, config.stall_after_s, config.max_queued_requests))

    def _model_card(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "admitscope",
            "max_model_len": model.max_context_tokens,
        }

    async def _generate(self, request: Request, kind: type[GenerationBody]) -> Response:
        """Check everything before the first byte of a response, hand over, and answer."""
        self._observer.on_received()
        try:
            return await self._accept(request, kind)
        except ApiError as error:
            refusal = error
        except RequestRefused as error:
            refusal = from_refusal(error)
        except EngineDead as error:
            refusal = unavailable(f"the engine stopped: {error}", "engine_dead")
        except ClientDisconnect:
            self._observer.on_disconnect()
            refusal = invalid("the client went away while it sent the body", None, "client_disconnected")
        self._observer.on_rejected(refusal.cause)
        return _refusal_response(refusal)

    async def _accept(self, request: Request, kind: type[GenerationBody]) -> Response:
        accepted_ns = self._clock.now_ns()
        context: RequestContext = request.state.context
        config = self._config
        data = await read_body(request, config.max_body_bytes, config.receive_timeout_s, self._observer)
        body = parse_body(kind, data)
        wanted, limit = num_choices(body), self._engine_thread.queue_limit
        if wanted > limit:  # before any work: a body of 4 MB can hold a million prompts
            raise invalid(f"{wanted} choices in one request; server.max_queued_requests={limit} bounds them", "prompt")
        intake = await take_in(
            body,
            model=self._model,
            tokenizer=self._tokenizer,
            grammars=self._grammars,
            context=context,
            accepted_ns=accepted_ns,
        )
        reply = await self._engine_thread.submit(intake.requests)
        return GenerationResponse(
            reply=reply,
            intake=intake,
            envelope=self._envelope(body, intake),
            stream=bool(body.stream),
            engine_thread=self._engine_thread,
            clock=self._clock,
            observer=self._observer,
        )

    def _envelope(self, body: GenerationBody, intake: Intake) -> Envelope:
        return Envelope(
            response_id=intake.response_id,
            created=int(time.time()),
            model=self._model.name,
            is_chat=isinstance(body, ChatCompletionBody),
            include_usage=body.include_usage,
            wants_logprobs=intake.requests[0].params.logprobs is not None,
        )


def create_app(  # noqa: PLR0913 - the composition root names every part once
    *,
    engine_thread: EngineThread,
    tokenizer: Tokenizer,
    model: ServedModel,
    config: ServerConfig,
    grammars: Grammars | None = None,
    clock: Clock | None = None,
    observer: FrontEndObserver | None = None,
    routers: Sequence[APIRouter] = (),
    version: str = "",
) -> FastAPI:
    """The application. Its lifespan starts the engine thread, and drains and stops it.

    grammars   None: this server's tokens are made up and follow none
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine_thread.start(asyncio.get_running_loop())
        yield
        await engine_thread.stop(config.drain_timeout_s)

    observer = observer or NullObserver()
    front = FrontEnd(
        engine_thread=engine_thread,
        tokenizer=tokenizer,
        model=model,
        config=config,
        grammars=grammars,
        clock=clock or MonotonicClock(),
        observer=observer,
    )
    app = FastAPI(title="admitscope", version=version or "0", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine_thread = engine_thread
    app.state.observer = observer
    app.add_middleware(Gate, config=config, observer=observer)
    _add_routes(app, front)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_fault)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # the way FastAPI documents
    return app


def _add_routes(app: FastAPI, front: FrontEnd) -> None:
    def post(path: str, handler: Callable[[Request], Awaitable[Response]], body: type[GenerationBody]) -> None:
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=operation(body))

    post("/v1/completions", front.completions, CompletionBody)
    post("/v1/chat/completions", front.chat_completions, ChatCompletionBody)
    app.add_api_route("/v1/models", front.models)
    app.add_api_route("/v1/models/{name:path}", front.model, responses=refusals("404"))
    probe: dict[int | str, dict[str, Any]] = {503: {"description": "Not so, and why"}}
    app.add_api_route("/health", front.health, response_model=None, responses=probe)
    app.add_api_route("/ready", front.ready, response_model=None, responses=probe)


def _probe(health: Health) -> Response:
    return JSONResponse(health.body, 200 if health.ok else 503)


def _refusal_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _on_api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _refusal_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the shape of every other error."""
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    body = error_body(message, kind="invalid_request_error", code=code)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """Parameters of extra routes."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:]))
    return _refusal_response(invalid(f"{name}: {first['msg']}", name or None))


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of this program. Its message may hold anything: the client gets the kind, the log the rest."""
    body = error_body(f"internal error ({type(error).__name__})", kind="server_error", code="internal_error")
    return JSONResponse(body, 500)
