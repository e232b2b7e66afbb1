// Requests to the server that the page came from, and no other, and the events of its streams.

export const root = new URL(".", location.href);

export class Unauthorized extends Error {}

export async function request(path, { key, body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const answer = await fetch(new URL(path, root), { ...options, headers, signal });
  if (answer.ok) return answer;
  let told = `${answer.status}`;
  try {
    const { error } = await answer.json();
    told = typeof error === "string" ? error : error.message;
  } catch { /* no JSON: the status says it */ }
  throw new (answer.status === 401 ? Unauthorized : Error)(told);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data:")) continue;
      const data = part.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? event.error);
      yield event;
    }
  }
}

// Both functions yield parts of an answer: {text, reasoning, tokens, finish, usage}, each optional.

export async function* chat(body, options) {
  const streamed = { stream: true, stream_options: { include_usage: true } };
  const asked = { ...body, ...streamed, logprobs: true, top_logprobs: 5 };
  const answer = await request("v1/chat/completions", { ...options, body: asked });
  for await (const event of events(answer)) {
    if (event.usage) yield { usage: event.usage };
    const choice = event.choices?.[0];
    if (!choice) continue;
    yield {
      text: choice.delta?.content ?? "",
      reasoning: choice.delta?.reasoning_content ?? "",
      tokens: (choice.logprobs?.content ?? []).map((one) => ({
        text: one.token,
        logprob: one.logprob,
        top: one.top_logprobs.map((other) => [other.token, other.logprob]),
      })),
      finish: choice.finish_reason ?? undefined,
    };
  }
}

const FINISHES = { eos_token: "stop", stop_sequence: "stop", length: "length" };

export async function* complete(inputs, parameters, options) {
  const body = { inputs, parameters };
  for await (const event of events(await request("generate_stream", { ...options, body }))) {
    const { text, logprob, special } = event.token;
    const top = (event.top_tokens ?? []).map((one) => [one.text, one.logprob]);
    yield { text: special ? "" : text, tokens: special ? [] : [{ text, logprob, top }] };
    const details = event.details;
    if (!details) continue;
    yield {
      finish: FINISHES[details.finish_reason] ?? details.finish_reason,
      usage: { prompt_tokens: details.input_length, completion_tokens: details.generated_tokens },
    };
  }
}
