// The page: keys, the model's names, a chat, and the engines.

import { keyOf, node, request, setKeys } from "./api.js";
import { fillIn, startChat } from "./chat.js";
import { watch } from "./engine.js";

const LOOK_MS = 500; // between two looks at the models while one is loaded

const keybox = document.getElementById("keybox");
const keys = { key: document.getElementById("key"), admin: document.getElementById("admin") };
const model = document.getElementById("model");
const loading = document.getElementById("loading");
let cards = []; // of the models

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

// A server of several models says which are loaded.
function option({ id, state }) {
  const made = node("option", "", state === undefined || state === "loaded" ? id : `${id} (${state === "absent" ? "not loaded" : state})`);
  made.value = id;
  return made;
}

async function loadModels() {
  try {
    cards = (await (await request("v1/models", { key: keyOf("key") })).json()).data;
    const chosen = model.value;
    model.replaceChildren(...cards.map(option));
    if (cards.some(({ id }) => id === chosen)) model.value = chosen;
    showDefaults();
  } catch (error) {
    if (error.needsKey) askForKeys();
  }
}

function showDefaults() {
  const card = cards.find(({ id }) => id === model.value);
  fillIn(card?.chat_defaults, card?.sampling_defaults);
}

// Have the server load the chosen model: an empty prompt of Ollama's API does. A request would, too, but later.
async function loadChosen() {
  const name = model.value;
  if (cards.find(({ id }) => id === name)?.state !== "absent") {
    showDefaults();
    return;
  }
  const began = performance.now();
  const [bar, text] = loading.children;
  const usual = cards.find(({ id }) => id === name).load_seconds;
  const tell = () => {
    const seconds = (performance.now() - began) / 1000;
    if (usual) bar.value = Math.min(0.99, seconds / usual);
    else bar.removeAttribute("value");
    text.textContent = `${name}: ${seconds.toFixed(0)} s${usual ? ` of about ${Math.ceil(usual)} s` : ""}`;
  };
  const timer = setInterval(tell, LOOK_MS);
  bar.hidden = false;
  loading.hidden = false;
  loading.className = "";
  tell();
  setTimeout(loadModels, LOOK_MS); // which shows that it is being loaded
  try {
    await request("api/generate", { key: keyOf("key"), body: { model: name, stream: false } });
    loading.hidden = true;
  } catch (error) {
    bar.hidden = true;
    loading.className = "error";
    text.textContent = error.message;
    if (error.needsKey) askForKeys();
  } finally {
    clearInterval(timer);
  }
  await loadModels();
}

model.addEventListener("change", loadChosen);
startChat(() => model.value, askForKeys, loadModels);
const restart = watch();
loadModels();
