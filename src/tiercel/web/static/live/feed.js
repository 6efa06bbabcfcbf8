// What the server tells, as long as the page is open: the last hour once, then the stream, again and again.
// Not EventSource, which cannot carry a token.

const SILENCE_MS = 15000;
const [WAIT_MS, WAIT_MS_MAX] = [700, 5000];
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

export function headers(token) {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// `tell(overview)`, `past(history)`, `gone(why)`; `token()` gives one or null; `refused()` resolves when there is another.
export async function follow({ tell, past, gone, token, refused }) {
  let wait = WAIT_MS;
  for (;;) {
    try {
      const answer = await fetch("v1/history?points=720", { headers: headers(token()), cache: "no-store" });
      if (answer.ok) past(await answer.json());
      await stream(token(), (told) => { wait = WAIT_MS; tell(told); });
      gone("the server has ended");
    } catch (fault) {
      if (fault.status === 401) {
        await refused();
        continue;
      }
      gone(fault.status ? `the server answered ${fault.status}` : "the server does not answer");
    }
    await sleep(wait);
    wait = Math.min(wait * 1.6, WAIT_MS_MAX);
  }
}

async function stream(token, tell) {
  const stop = new AbortController();
  let watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
  try {
    const answer = await fetch("v1/overview/stream", { headers: headers(token), cache: "no-store", signal: stop.signal });
    if (!answer.ok) throw Object.assign(new Error("refused"), { status: answer.status });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data && !event.startsWith("event: end")) tell(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watchdog);
    stop.abort();
  }
}
