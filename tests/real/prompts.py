"""Forty prompts for a trained model: English, code, Chinese, emoji, a long text and chats."""

from __future__ import annotations

ENGLISH = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics say that",
    "Dear Professor Martin,\n\nI am writing to",
    "1, 2, 4, 8, 16,",
    "Q: What is the largest planet of the solar system?\nA:",
    "The recipe needs two eggs, 200 g of flour, and",
    "In 1969, Neil Armstrong",
    "To be, or not to be, that is",
    "The difference between a virus and a bacterium is that",
    "a",
]
CODE = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM users",
    "fn main() {\n    let mut total = 0;\n    for i in 0..10 {",
    "<!DOCTYPE html>\n<html>\n<head>\n\t<title>",
    "#include <stdio.h>\n\nint main(void) {\n",
    '{"name": "Ada", "born": 1815, "fields": [',
    "git commit -m ",
]
CHINESE = [
    "中国的首都是",
    "从前有一座山，山里有一座庙，",
    "人工智能的发展",
    "请把下面的句子翻译成英文：我喜欢喝茶。",
    "春眠不觉晓，",
    "一、二、三、四、",
]
EMOJI = [
    "😀😃😄😁",
    "I love pizza 🍕 and",
    "👩‍👩‍👧‍👦 is a family emoji. 🇫🇷 is the flag of",
    "Weather today: ☀️, tomorrow: 🌧️, then",
    "é è ê 🙂 ñ ü — “quotes” …",
    "🚀🌕 to the moon!",
]
# About 1,500 tokens.
LONG = "\n".join(
    f"Entry {i}: on day {i * 7 % 31} the ship sailed {i * 37 % 113} miles, the crew of {i % 9 + 3} ate fish."
    for i in range(57)
)
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the autumn.",
    "Explain recursion to a child in one sentence.",
    "List three prime numbers.",
    "用一句话介绍你自己。",
    "Write a Python function that reverses a string.",
    "What does 🎂 mean?",
]
TEXTS = [*ENGLISH, *CODE, *CHINESE, *EMOJI, LONG]
