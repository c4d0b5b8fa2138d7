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

// A server of several models says which are loaded; a request loads the others.
function option({ id, state }) {
  const made = node("option", "", state === undefined || state === "loaded" ? id : `${id} (${state === "absent" ? "not loaded" : state})`);
  made.value = id;
  return made;
}

async function loadModels() {
  try {
    const { data } = await (await request("v1/models", { key: keyOf("key") })).json();
    const chosen = model.value;
    model.replaceChildren(...data.map(option));
    if (data.some(({ id }) => id === chosen)) model.value = chosen;
    fillIn(data.find(({ id }) => id === model.value)?.chat_defaults);
  } catch (error) {
    if (error.needsKey) askForKeys();
  }
}

startChat(() => model.value, askForKeys, loadModels);
const restart = watch();
loadModels();
