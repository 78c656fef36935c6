// The server's OpenAI-compatible API. All addresses are relative: the page works below any path.

export class ApiError extends Error {
  /** kind: "network" (nobody answers), "http" (a status), "stream" (broke off or failed after it began). */
  constructor(kind, message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, retryAfter });
  }
}

let key = "";
export const setKey = (value) => (key = value);
const headers = (extra = {}) => (key ? { ...extra, Authorization: `Bearer ${key}` } : extra);

async function request(path, options = {}) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "same-origin", ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("network", "The server does not answer.");
  }
}

async function failure(response) {
  const error = await response.json().then((body) => body?.error ?? body, () => ({})) ?? {};
  const message = typeof error.message === "string" ? error.message : typeof error.detail === "string" ? error.detail : "";
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const code = typeof error.code === "string" ? error.code : null;
  return new ApiError("http", explain(response.status, message, code, retryAfter), { status: response.status, code, retryAfter });
}

/** The server's messages are parts of log lines; here they stand alone. */
function sentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function explain(status, message, code, retryAfter) {
  if (status === 401) return "The server wants an API key.";
  const standard = { 429: "Too many requests.", 503: "The server is busy." }[status];
  const said = sentence(message) || standard || `The server answered with status ${status}.`;
  if (standard) return `${said} Try again in ${retryAfter ?? "a few"} seconds.`;
  return code === "context_length_exceeded" ? `${said} Delete earlier turns or start a new chat.` : said;
}

export async function getJson(path) {
  const response = await request(path);
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** { state: "ok" | "loading" | "gone", reason: what the server says about itself while it cannot answer }. */
export async function health() {
  try {
    const response = await request("health", { signal: AbortSignal.timeout(5000) });
    if (response.ok) return { state: "ok", reason: "" };
    const { message } = (await response.json())?.error ?? {};
    const reason = typeof message === "string" ? sentence(message) : "";
    return { state: response.status === 503 ? "loading" : "gone", reason };
  } catch {
    return { state: "gone", reason: "" };
  }
}

/**
 * The chunks of a streamed chat completion, as they arrive.
 * @throws ApiError; AbortError when the signal fires.
 */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await failure(response);
  let finished = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ApiError("stream", "The server sent something that is not JSON.");
    }
    if (chunk?.error) throw new ApiError("stream", sentence(String(chunk.error.message ?? "the server failed while it was answering")));
    finished ||= Boolean(chunk?.choices?.[0]?.finish_reason);
    yield chunk;
  }
  if (!finished) throw new ApiError("stream", "The connection ended before the answer was complete.");
}

/** The data of server-sent events; comments and other fields are skipped. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) break;
    }
    if (data.length) yield data.join("\n");
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("stream", "The connection to the server broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** An answer that grows: text, where its tokens came from, live speed, and the final statistics. */
export class Answer {
  constructor() {
    Object.assign(this, { content: "", pieces: [], stats: {}, finish: null });
  }

  add(chunk) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta?.content;
    if (typeof delta === "string" && delta) this.#append(delta, chunk.esp_edge?.pieces);
    if (choice?.finish_reason) this.finish = String(choice.finish_reason);
    const { esp_edge: live, timings: t, speculative_decoding_stats: s, usage } = chunk;
    this.#keep({ tps: live?.tokens_per_second, tau: live?.tau, cached: usage?.prompt_tokens_details?.cached_tokens });
    this.#keep({
      n: t?.predicted_n, ms: t?.predicted_ms, tps: t?.predicted_per_second, promptN: t?.prompt_n, promptMs: t?.prompt_ms,
      drafted: t?.draft_n, accepted: t?.draft_n_accepted,
    });
    this.#keep({
      tau: s?.mean_acceptance_length, rate: s?.draft_acceptance_rate, passes: s?.num_spec_steps,
      drafted: s?.num_draft_tokens, accepted: s?.num_accepted_draft_tokens,
    });
    if (Array.isArray(s?.acceptance_histogram)) {
      this.stats.histogram = s.acceptance_histogram.slice(0, 64).map((n) => (Number.isFinite(n) ? n : 0));
    }
  }

  #keep(found) {
    for (const [name, value] of Object.entries(found)) if (Number.isFinite(value)) this.stats[name] = value;
  }

  /** Pieces that do not spell the delta are not believed: it then counts as the model's own. */
  #append(delta, pieces) {
    this.content += delta;
    const good = Array.isArray(pieces) && pieces.every((p) => typeof p?.text === "string" && typeof p.source === "string") &&
      pieces.map((p) => p.text).join("") === delta;
    if (good) for (const p of pieces) if (p.text) this.pieces.push([p.text.length, p.source.slice(0, 32)]);
    if (!good) this.pieces.push([delta.length, ""]);
  }
}

/** The request for these messages with these settings; empty settings are left to the server. */
export function buildRequest(messages, settings, model) {
  const body = { messages };
  if (model) body.model = model;
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  body.speculative = { enabled: settings.speculate };
  if (settings.drafter) body.speculative.drafter = settings.drafter;
  if (settings.block_complexity !== null) body.speculative.block_complexity = settings.block_complexity;
  return body;
}
