#!/usr/bin/env python3
"""Asks `foretell mcp` five questions of users through the official Python SDK, and prints the
session. It fails unless every answer is one.

    python3 -m venv target/mcp-tools && target/mcp-tools/bin/pip install mcp
    target/mcp-tools/bin/python benches/mcp_session.py target/release/foretell
"""

import asyncio
import sys
import time

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.12 GiB is free. Including non-PyTorch memory, this process has 22.52 GiB memory in use. Of the allocated memory 21.50 GiB "
    "is allocated by PyTorch, and 612.00 MiB is reserved by PyTorch but unallocated."
)

LORA = {"model": "llama3-70b", "topology": "2xa100-80g", "method": "lora", "sequence": 2048, "global-batch": 8}
SMALL = {"model": "llama3-8b", "topology": "8xh100", "time-limit": "5s"}


async def ask(session, question, tool, arguments, fails=False):
    """Asks one question, prints the answer, and returns its document."""
    started = time.monotonic()
    result = await session.call_tool(tool, arguments)
    seconds = time.monotonic() - started
    text = result.content[0].text
    print(f"\n## {question}\n\n{tool} {short(arguments)}: {seconds:.2f} s\n\n{text}")
    is_error = getattr(result, "is_error", None)
    is_error = result.isError if is_error is None else is_error
    assert bool(is_error) == fails, f"{question}: {text}"
    structured = getattr(result, "structured_content", None)
    return result.structuredContent if structured is None else structured


def short(arguments):
    """The arguments without long values."""
    return {name: value if len(str(value)) < 80 else "..." for name, value in arguments.items()}


async def main(program):
    async with stdio_client(StdioServerParameters(command=program, args=["mcp"])) as (read, write):
        async with ClientSession(read, write) as session:
            greeting = await session.initialize()
            tools = await session.list_tools()
            print(f"# A session with `foretell mcp`\n\n{greeting}\n\ntools: {', '.join(tool.name for tool in tools.tools)}")
            await ask(session, "Will Llama-3 70B LoRA fit on 2 A100-80G?", "plan", LORA, fails=True)
            fits = {"model": "llama3-8b", "topology": "1xrtx-4090", "table": "context,method", "time-limit": "1s"}
            cells = (await ask(session, "What fits on one RTX 4090?", "fits", fits))["cells"]
            assert any(cell["fits"] for cell in cells if isinstance(cell, dict))
            plan = (await ask(session, "How do I train Llama-3 8B on 8 H100?", "plan", SMALL))["plan"]
            run = await ask(session, "How long do 10 billion tokens take?", "simulate", {"plan": plan, "tokens": 10e9})
            assert run["cost"]["run"]["seconds"] > 0
            faster = {"plan": plan, "what-if": ["intra_node.bandwidth*2", "peak*2"]}
            await ask(session, "Would faster links help?", "what_if", faster)
            job = {"error": OUT_OF_MEMORY, "model": "llama3-8b", "topology": "1xrtx-4090", "method": "full"}
            await ask(session, "Why am I out of memory?", "explain_error", job)
            files = await ask(session, "Give me the files of Megatron.", "export", {"plan": plan, "to": "megatron"})
            assert "plan.yaml" in files["contents"], files
            config = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}'
            model = await ask(session, "Read this config.json.", "import", {"form": "hf-config", "files": [config]})
            await ask(session, "And plan it.", "plan", {"model": model["model"], "topology": "2xa100-80g"})
            other = {**SMALL, "compare": plan}
            await ask(session, "Is this plan good?", "compare", other)
            await ask(session, "May it read my files?", "plan", {"model": "/etc/passwd", "topology": "8xh100"}, fails=True)


asyncio.run(main(sys.argv[1]))
