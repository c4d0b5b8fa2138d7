// The page: keys, the model's names, a chat, and the engines.

import { keyOf, node, request, setKeys } from "./api.js";
import { fillIn, startChat } from "./chat.js";
import { watch } from "./engine.js";

const keybox = document.getElementById("keybox");
const keys = { key: document.getElementById("key"), admin: document.getElementById("admin") };
const model = document.getElementById("model");

function askForKeys() {
  if (keybox.open) return;
  for (const name of Object.keys(keys)) keys[name].value = keyOf(name);
  keybox.returnValue = "";
  keybox.showModal();
}

keybox.addEventListener("close", () => {
  if (keybox.returnValue !== "save") return;
  setKeys({ key: keys.key.value.trim(), admin: keys.admin.value.trim() });
  loadModels();
  restart();
});
document.getElementById("keys").addEventListener("click", askForKeys);

async function loadModels() {
  try {
    const { data } = await (await request("v1/models", { key: keyOf("key") })).json();
    model.replaceChildren(...data.map(({ id }) => node("option", "", id)));
    fillIn(data[0]?.chat_defaults);
  } catch (error) {
    if (error.needsKey) askForKeys();
  }
}

startChat(() => model.value, askForKeys);
const restart = watch();
loadModels();
