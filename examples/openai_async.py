"""Many questions at once: the server runs them in one batch, and each gets the text that it would get alone."""

import asyncio
import os

from openai import AsyncOpenAI

NAMES = ["read_lines", "write_json", "count_words", "find_files", "parse_date", "merge_sort"]
client = AsyncOpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")


async def complete(name: str) -> str:
    prompt = f"def {name}("
    answer = await client.completions.create(model="default", prompt=prompt, max_tokens=24, temperature=0)
    return prompt + answer.choices[0].text


async def main() -> None:
    together = await asyncio.gather(*map(complete, NAMES))
    alone = await complete(NAMES[0])
    for text in together:
        print(f"{text}\n")
    print(
        f"# {len(together)} at once; the first again, alone, is {'the same' if alone == together[0] else 'DIFFERENT'}"
    )


asyncio.run(main())
