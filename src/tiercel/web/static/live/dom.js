// Elements without markup: text always goes in as text, so nothing that is told can become code.

export const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--") || name === "width%") style(node, name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// The page's policy forbids style attributes, not properties.
export function style(node, name, value) {
  if (name === "width%") node.style.width = `${Math.max(0, Math.min(100, value))}%`;
  else node.style.setProperty(name, value);
}

// Only what changed is touched, so that focus, selection and hover survive a figure a second.
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

// Rows by key: known ones are updated in place, new ones made, others removed; order as given.
export function rows(host, items, key, make, update) {
  const known = new Map([...host.children].filter((node) => node.dataset.key).map((node) => [node.dataset.key, node]));
  let at = null;
  for (const item of items) {
    const name = String(key(item));
    let node = known.get(name);
    if (node) known.delete(name);
    else {
      node = make(item);
      node.dataset.key = name;
    }
    const next = at ? at.nextSibling : [...host.childNodes].find((one) => one.dataset && one.dataset.key) || null;
    if (next !== node) host.insertBefore(node, next);
    update(node, item);
    at = node;
  }
  for (const node of known.values()) node.remove();
}
