// Chats and settings in localStorage: one key a chat, so that two tabs do not overwrite each other.
// What is read back, from the store or from an imported file, is rebuilt field by field; nothing unknown survives.

const CHAT = "esp_edge.chat.";
const SETTINGS = "esp_edge.settings";
const KEY = "esp_edge.key";
const FORMAT = "esp-edge-chats";
const MAX_TEXT = 2_000_000;
const MAX_IMPORT = 50_000_000;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

export function newChat(system) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, messages: [] };
}

/** The title: as renamed, else the start of the first question. */
export function titleOf(chat) {
  if (chat.title) return chat.title;
  const first = chat.messages.find((m) => m.role === "user")?.content.trim().split("\n")[0] ?? "";
  return first.length > 60 ? `${first.slice(0, 59).trimEnd()}\u2026` : first || "New chat";
}

// -- checking --------------------------------------------------------------------------------------------------------

class Invalid extends Error {}

function need(ok, where, what) {
  if (!ok) throw new Invalid(`${where} must be ${what}`);
}

function cleanText(value, where, most = MAX_TEXT) {
  need(typeof value === "string" && value.length <= most, where, `a text of at most ${most} characters`);
  return value;
}

const number = (value, low, high) => typeof value === "number" && value >= low && value <= high;

const STATS = ["tps", "tau", "n", "ms", "promptN", "promptMs", "drafted", "accepted", "rate", "passes", "cached", "seconds"];

function cleanStats(raw) {
  const stats = {};
  for (const name of STATS) if (number(raw?.[name], 0, 1e12)) stats[name] = raw[name];
  if (Array.isArray(raw?.histogram)) stats.histogram = raw.histogram.slice(0, 64).map((n) => (number(n, 0, 1e12) ? n : 0));
  return stats;
}

/** [length, source] runs that cover the content, else none. */
function cleanPieces(raw, content) {
  if (!Array.isArray(raw)) return [];
  let total = 0;
  const pieces = [];
  for (const entry of raw) {
    const [length, source] = Array.isArray(entry) ? entry : [];
    if (!Number.isInteger(length) || length < 1 || typeof source !== "string" || source.length > 32) return [];
    total += length;
    pieces.push([length, source]);
  }
  return total === content.length ? pieces : [];
}

function cleanMessage(raw, where) {
  need(raw && typeof raw === "object", where, "an object");
  need(raw.role === "user" || raw.role === "assistant", `${where}.role`, "user or assistant");
  const content = cleanText(raw.content, `${where}.content`);
  if (raw.role === "user") return { role: "user", content };
  const message = { role: "assistant", content, pieces: cleanPieces(raw.pieces, content), stats: cleanStats(raw.stats), finish: null };
  if (typeof raw.finish === "string") message.finish = raw.finish.slice(0, 40);
  if (typeof raw.error === "string") message.error = raw.error.slice(0, 2000);
  return message;
}

function cleanChat(raw, where) {
  need(raw && typeof raw === "object" && !Array.isArray(raw), where, "an object");
  need(Array.isArray(raw.messages) && raw.messages.length <= 20000, `${where}.messages`, "a list of at most 20000 messages");
  const time = (value) => (number(value, 0, 8.64e15) ? Math.floor(value) : Date.now());
  return {
    id: typeof raw.id === "string" && /^[\w-]{1,64}$/.test(raw.id) ? raw.id : newId(),
    title: cleanText(raw.title ?? "", `${where}.title`, 300),
    created: time(raw.created),
    updated: time(raw.updated),
    system: cleanText(raw.system ?? "", `${where}.system`),
    messages: raw.messages.map((message, i) => cleanMessage(message, `${where}.messages[${i}]`)),
  };
}

// -- chats -----------------------------------------------------------------------------------------------------------

/** All stored chats, the newest first; what cannot be read is left where it is and not shown. */
export function loadChats() {
  const chats = [];
  for (const name of Object.keys(localStorage)) {
    const chat = name.startsWith(CHAT) ? loadChat(name.slice(CHAT.length)) : null;
    if (chat) chats.push(chat);
  }
  return chats.sort((a, b) => b.updated - a.updated);
}

export function loadChat(id) {
  try {
    return { ...cleanChat(JSON.parse(localStorage.getItem(CHAT + id)), "chat"), id };
  } catch {
    return null;
  }
}

/** False when the browser's storage is full. */
export function saveChat(chat) {
  try {
    localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export const removeChat = (id) => localStorage.removeItem(CHAT + id);
export const chatIdOf = (storageKey) => (storageKey?.startsWith(CHAT) ? storageKey.slice(CHAT.length) : null);

export const exportText = (chats) => JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);

/**
 * The chats of an exported file.
 * @throws Error saying in one line what is wrong with the file.
 */
export function parseImport(text) {
  if (text.length > MAX_IMPORT) throw new Error("The file is larger than 50 MB.");
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.chats)) {
    throw new Error(`The file is not an export of this page: "format" must be "${FORMAT}" and "chats" a list.`);
  }
  if (data.version !== 1) throw new Error("The file was written by a newer version of this page.");
  return data.chats.map((chat, i) => cleanChat(chat, `chats[${i}]`));
}

// -- settings --------------------------------------------------------------------------------------------------------

/** Name -> [label, lowest, highest, step: 1 = whole numbers]; null in the settings means: as the server has it. */
export const NUMBERS = {
  temperature: ["Temperature", 0, 5, 0.1],
  top_p: ["Top p", 0, 1, 0.05],
  top_k: ["Top k", 0, 1000000, 1],
  min_p: ["Min p", 0, 1, 0.01],
  max_tokens: ["Max tokens", 1, 1000000, 1],
  seed: ["Seed", 0, Number.MAX_SAFE_INTEGER, 1],
  block_complexity: ["Rows a pass", 1, 240, 1],
};

export function validNumber(name, value) {
  const [, low, high, step] = NUMBERS[name];
  return number(value, low, high) && (step < 1 || Number.isInteger(value));
}

export function loadSettings() {
  let raw = null;
  try {
    raw = JSON.parse(localStorage.getItem(SETTINGS));
  } catch {
    // as if there were none
  }
  const text = (name) => (typeof raw?.[name] === "string" ? raw[name].slice(0, 100000) : "");
  const settings = { system: text("system"), stop: text("stop"), drafter: text("drafter") };
  for (const name of Object.keys(NUMBERS)) settings[name] = validNumber(name, raw?.[name]) ? raw[name] : null;
  return { ...settings, speculate: raw?.speculate !== false, colours: raw?.colours === true };
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // full: the settings hold until the page is closed
  }
}

/** The API key stays out of settings and exports. */
export const loadKey = () => localStorage.getItem(KEY) ?? "";
export const saveKey = (key) => (key ? localStorage.setItem(KEY, key) : localStorage.removeItem(KEY));
