"""Start a server and talk to it with OpenAI's client (pip install openai)."""

import subprocess
import sys

from openai import OpenAI

# Port 0 takes a free one. The server says which when it is ready: "demo is served at http://127.0.0.1:PORT".
command = [sys.executable, "-m", "paged", "serve", "demo", "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    try:
        line = next(line for line in server.stderr if "is served at" in line)
        client = OpenAI(base_url=f"{line.split()[-1]}/v1", api_key="none", timeout=60)

        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Write a function."}], max_tokens=32, seed=1
        )
        print(answer.choices[0].message.content, answer.usage)

        stream = client.completions.create(model="demo", prompt="import ", max_tokens=32, stream=True, seed=1)
        for event in stream:
            print(event.choices[0].text, end="", flush=True)
        print()
    finally:
        server.terminate()  # SIGTERM: requests in progress finish
