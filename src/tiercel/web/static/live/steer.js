// The few calls that change something: asked about first where it hurts, sent with the token, told what came of it.

import { $, el, show, text } from "./dom.js";
import { many } from "./format.js";
import { headers } from "./feed.js";

const KEPT = "tiercel-token"; // in this tab only
const SAID_MS = 5000;

export const token = () => sessionStorage.getItem(KEPT);
let quiet = 0;

export function say(words, bad = false) {
  const node = $("said");
  node.classList.toggle("bad", bad);
  text(node, words);
  show(node, true);
  clearTimeout(quiet);
  quiet = setTimeout(() => show(node, false), SAID_MS);
}

// A dialog; resolves to its form's data, or null for no.
function ask({ title, words, yes, more = [], needsToken, wrong = "" }) {
  const [dialog, input] = [$("ask"), $("ask-token-input")];
  text($("ask-title"), title);
  text($("ask-text"), words);
  text($("ask-yes"), yes);
  text($("ask-wrong"), wrong);
  show($("ask-wrong"), Boolean(wrong));
  $("ask-more").replaceChildren(...more);
  show($("ask-token"), needsToken);
  input.value = "";
  input.required = needsToken;
  return new Promise((done) => {
    const form = dialog.querySelector("form");
    const end = (given) => {
      form.onsubmit = dialog.onclose = $("ask-no").onclick = null;
      if (dialog.open) dialog.close();
      done(given);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      const given = new FormData(form);
      if (needsToken) sessionStorage.setItem(KEPT, input.value.trim());
      end(given);
    };
    $("ask-no").onclick = () => end(null);
    // The event comes late: by then the dialog may be open again, for another question.
    dialog.onclose = () => { if (!dialog.open) end(null); };
    dialog.showModal();
    if (needsToken) input.focus();
  });
}

export async function askToken(wrong = "") {
  return ask({
    title: "Token needed", yes: "Go on", needsToken: true, wrong,
    words: "It was printed when the server started, is in its token file, or is the API key of tiercel serve. It is kept in this tab only.",
  });
}

async function send(action, body) {
  for (let wrong = ""; ;) {
    if (!token() && !(await askToken(wrong))) return null;
    let answer;
    try {
      answer = await fetch(`v1/cache/${action}`, { method: "POST", headers: { ...headers(token()), "Content-Type": "application/json" }, body: JSON.stringify(body) });
    } catch {
      say("The server does not answer.", true);
      return null;
    }
    const told = await answer.json().catch(() => ({}));
    if (answer.ok) return told;
    if (answer.status !== 401) {
      say(told.error ? told.error.message : `The server answered ${answer.status}.`, true);
      return null;
    }
    sessionStorage.removeItem(KEPT);
    wrong = "This token is not the right one.";
  }
}

const DONE = {
  prefetch: (told) => `${told.done} of ${many(told.blocks, "block")} in RAM`,
  pin: (told) => `${told.done} of ${many(told.blocks, "block")} pinned for 10 minutes`,
  unpin: () => "no longer pinned",
  demote: (told) => (told.done ? `${many(told.done, "block")} left RAM` : "nothing left RAM: its blocks are shared, pinned, in use or in no tier"),
  drop: (told) => `${many(told.done, "block")} forgotten`,
};

async function onPrefix(action, name) {
  const told = await send(action, { prefix: name });
  if (told) say(`${name}: ${DONE[action](told)}`);
}

const MORE = [
  ["unpin", "Unpin", "It may be evicted again."],
  ["demote", "Demote", "Write down what tiers lack, then free its RAM. Only blocks that no other prompt shares."],
  ["drop", "Drop", "Forget it everywhere, with all that goes on from it; not what others share."],
];

export async function steerPrefix(action, node) {
  if (action !== "more") return onPrefix(action, node.prefix);
  const options = el("div", { class: "options" }, ...MORE.map(([value, name, words], n) => {
    const radio = el("input", { type: "radio", name: "action", value, required: "", ...(n === 0 ? { checked: "" } : {}) });
    return el("label", {}, radio, name, el("span", {}, words));
  }));
  const given = await ask({ title: `Prefix ${node.prefix}`, words: `${many(node.start + node.length, "block")} from the prompt's beginning.`, yes: "Do it", more: [options], needsToken: false });
  return given && onPrefix(given.get("action"), node.prefix);
}

export async function clear(scope) {
  const what = scope ? `${scope.model || scope.tag}${scope.salt ? `, tenant ${scope.salt}` : ""}` : "every scope";
  const given = await ask({
    title: scope ? "Clear this scope?" : "Clear everything?", yes: "Clear", needsToken: false,
    words: `All blocks of ${what} are forgotten, in RAM and in every tier. Prompts are then computed again.`,
  });
  if (!given) return;
  const told = await send("clear", scope ? { scope: scope.tag } : { all: true });
  if (told) say(`${many(told.done, "block")} forgotten`);
}
