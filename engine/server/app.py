"""The aiohttp application: every path, the checks that all share, and the small endpoints themselves."""

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from mambalign.engine.server.access import add_headers, auth_middleware, cors_middleware, request_id_middleware
from mambalign.engine.server.answer import json_response
from mambalign.engine.server.chat import chat_completions
from mambalign.engine.server.chat_messages import messages_for_template
from mambalign.engine.server.completions import completions
from mambalign.engine.server.dashboard import dashboard, dashboard_data
from mambalign.engine.server.errors import ApiError, error_middleware, unavailable
from mambalign.engine.server.openapi import openapi_document
from mambalign.engine.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    template_options,
)
from mambalign.engine.server.response_body import ResponseBody
from mambalign.engine.server.responses import responses
from mambalign.engine.server.state import STATE, ServerState

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def make_app(state: ServerState) -> web.Application:
    app = web.Application(
        middlewares=[
            request_id_middleware,
            error_middleware,
            count_middleware,
            cors_middleware,
            auth_middleware,
            body_middleware,
        ],
        client_max_size=state.options.max_body_size,
    )
    app[STATE] = state
    app.on_response_prepare.append(add_headers)
    app.on_cleanup.append(close_state)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/dashboard", dashboard),
            web.get("/dashboard/data", dashboard_data),
            web.get("/openapi.json", openapi),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", get_model),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.post("/reset_prefix_cache", reset_prefix_cache),
        ]
    )
    return app


async def close_state(app: web.Application) -> None:
    await app[STATE].close()


@web.middleware
async def count_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    """Know who is at work, so that a drain can wait for them."""
    state = request.app[STATE]
    state.num_handlers += 1
    try:
        return await handler(request)
    finally:
        state.num_handlers -= 1


@web.middleware
async def body_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    """Have the whole body before a handler asks for it, in bounded time."""
    if request.can_read_body:
        limit = request.app[STATE].options.read_timeout
        try:
            async with asyncio.timeout(limit):
                await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {limit:g} s", code="read_timeout") from None
        except web.RequestPayloadError as error:  # its length or its compression is not what the header says
            raise ApiError(400, f"the body cannot be read: {error}", code="bad_body") from error
    return await handler(request)


async def health(request: web.Request) -> web.Response:
    """200 when a request would run now; 503, with the reason, while loading, draining, dead, or found wrong."""
    state = request.app[STATE]
    state.require_ready()
    await state.refresh_stats()
    if mismatches := state.metrics.engine.stats.fused_copy_mismatches_total:
        raise unavailable(f"the fused-copy check found {mismatches} wrong copies: see the log", "fused_copy_mismatch")
    return json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """Always answers: with the last known statistics when the engine cannot."""
    state = request.app[STATE]
    await state.refresh_stats()
    if (ready := state.client.ready) is not None:
        state.metrics.engine.num_positions = ready.spec_tokens
        state.metrics.engine.runner_labels = {"runner": ready.runner, "layout": ready.conv_layout}
    return web.Response(body=state.metrics.text(state.model_name), headers={"Content-Type": CONTENT_TYPE_LATEST})


def model_card(state: ServerState) -> dict[str, object]:
    ready = state.client.ready
    return {
        "id": state.model_name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "mambalign",
        "max_model_len": ready.max_model_len if ready else None,
    }


async def openapi(request: web.Request) -> web.Response:
    """This server's paths and the bodies they take, as an OpenAPI document."""
    return json_response(openapi_document(request.app.router, BODIES))


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [model_card(request.app[STATE])]})


async def get_model(request: web.Request) -> web.Response:
    """The model, if it has this name."""
    state = request.app[STATE]
    state.check_model(request.match_info["name"])
    return json_response(model_card(state))


async def tokenize(request: web.Request) -> web.Response:
    """The token ids a completion of this prompt, or a chat of these messages, would start from."""
    state = request.app[STATE]
    body = parse_body(await request.read(), TokenizeBody)
    state.check_model(body.model)
    ready = state.require_ready()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages is required, and only one of them", param="prompt")
    if body.prompt is not None:
        tokens = await state.encode(body.prompt)
    else:
        tokens = await rendered_ids(state, body)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_model_len})


async def rendered_ids(state: ServerState, body: TokenizeBody) -> list[int]:
    options = template_options(body, body.tools or [])
    return (await state.encode_chat(messages_for_template(body.messages or []), options)).token_ids


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    state = request.app[STATE]
    body = parse_body(await request.read(), DetokenizeBody)
    state.check_model(body.model)
    limit = state.require_ready().vocab_size
    if not all(0 <= token_id < limit for token_id in body.tokens):
        raise ApiError(400, f"tokens holds ids outside 0..{limit - 1}", param="tokens")
    return json_response({"prompt": await asyncio.to_thread(state.tokenizer.decode, body.tokens)})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget what prompts had in common; nothing in the body.

    `reset` is false when running requests still hold some of it; the rest was reset all the same.
    """
    state = request.app[STATE]
    state.require_ready()
    return json_response({"reset": await state.client.reset_prefix_cache()})
