// The head of the page. It counts the age of the data by itself, so that the age keeps rising when nothing arrives any
// more: a page that lost its server must not look alive. While the data is old, the whole page is marked.
const SVG = "http://www.w3.org/2000/svg";

function el(tag, className, label) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (label !== undefined) node.textContent = label;
  return node;
}

function spark(values) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const seen = values.filter((v) => v !== null);
  if (seen.length > 1) {
    const top = Math.max(...seen) || 1;
    const step = 100 / Math.max(1, values.length - 1);
    const points = values
      .map((v, i) => (v === null ? null : `${(i * step).toFixed(1)},${(22.5 - (21 * v) / top).toFixed(1)}`))
      .filter((p) => p !== null);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    svg.append(line);
  }
  return svg;
}

// A real link, so that it can be copied and opened beside; a plain click stays on this page.
function link(node, go) {
  if (!go) return;
  const address = new URLSearchParams(window.location.search);
  for (const [name, value] of Object.entries(go)) value === null ? address.delete(name) : address.set(name, value);
  node.href = `?${address}`;
  node.onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    did("go", go);
  };
}

function tile(data) {
  const box = el("a", `tile ${data.tone ?? ""}`);
  link(box, data.go);
  box.title = data.help ?? "";
  box.dataset.testid = `tile-${data.id}`;
  const label = el("div", "label", data.label);
  if (data.aim) label.append(el("span", "aim", data.aim));
  box.append(label);
  const numbers = el("div", "numbers");
  data.values.forEach(([name, number, unit], index) => {
    const item = el("span", index ? `number second${data.late ? " late" : ""}` : "number");
    if (name) item.append(el("em", "", name));
    item.append(el("b", "", number));
    if (unit) item.append(el("small", "", unit));
    numbers.append(item);
  });
  box.append(numbers, el("div", "sub", data.sub));
  if (data.spark) box.append(spark(data.spark));
  return box;
}

function facts(root, pairs) {
  root.querySelector(".facts").replaceChildren(
    ...pairs.map(([name, what]) => {
      const fact = el("span");
      fact.append(el("em", "", name), document.createTextNode(` ${what}`));
      return fact;
    }),
  );
}

function mix(root, data) {
  root.querySelector(".mix").hidden = !data;
  if (!data) return;
  root.querySelector(".mix-title").textContent = data.title;
  const strip = root.querySelector(".strip");
  strip.setAttribute("aria-label", data.parts.map((p) => `${p.label} ${p.count}`).join(", ") || data.title);
  strip.replaceChildren(
    ...data.parts.map((part) => {
      const piece = el("i");
      piece.style.flexGrow = part.count;
      piece.style.background = part.colour;
      piece.title = `${part.label}: ${part.count}. ${part.why}`;
      return piece;
    }),
  );
  root.querySelector(".legend").replaceChildren(
    ...data.parts.map((part) => {
      const item = el("li");
      const dot = el("i");
      dot.style.background = part.colour;
      item.append(dot, el("b", "", String(part.count)), document.createTextNode(` ${part.label}`), el("span", "", part.why));
      return item;
    }),
  );
}

const ago = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);

function tick(root) {
  tellAgain();
  const { data, received } = root.pulse;
  // Two ages: since an answer came, and how old its numbers already were then. The second is the engine's own word.
  const waited = data.age_s === null ? null : data.age_s + (performance.now() - received) / 1000;
  const isCut = data.stands === null && waited !== null && waited > data.old_after_s;
  const isOld = isCut || (data.stands === null && data.loop_s > data.old_after_s);
  root.classList.toggle("is-old", isOld);
  const fresh = root.querySelector(".fresh");
  fresh.className = `fresh ${data.stands !== null ? "paused" : isOld || data.error ? "old" : "good"}`;
  root.querySelector(".age").textContent =
    data.stands ?? (waited === null ? data.words.none : data.words.old.replace("{ago}", ago(waited + data.loop_s)));
  const banner = root.querySelector(".banner");
  const said = data.error ?? (isCut ? [data.words.lost, data.words.lost_why] : data.warning ?? []);
  banner.hidden = data.paused || data.bare || !said.length;
  banner.classList.toggle("soft", !data.error && !isCut);
  [...banner.children].forEach((line, index) => {
    const text = said[index] ?? "";
    line.hidden = !text;
    if (line.textContent !== text) line.textContent = text;
  });
  document.documentElement.dataset.admitscope = data.stands !== null ? "paused" : isOld ? "old" : "live";
}

// What the viewer did, in order, until the server says that it is done. A message may be lost, or meet a run that is
// being replaced: so it is told again, and the numbers keep it from counting twice. It outlives the head, which React
// may take away and bring back at any moment.
const MAX_WAITING = 200;
const TELL_AGAIN_MS = 1500;
const deeds = (window.admitscope ??= { page: `${Date.now()}-${Math.random()}`, next: 1, waiting: [], say: null, saidAt: 0 });

function did(kind, value) {
  if (deeds.waiting.length >= MAX_WAITING) return;
  deeds.waiting.push([deeds.next++, kind, value]);
  tell();
}

function tell() {
  if (!deeds.waiting.length || !deeds.say) return;
  deeds.saidAt = performance.now();
  deeds.say({ page: deeds.page, waiting: [...deeds.waiting] });
}

function tellAgain() {
  if (performance.now() - deeds.saidAt > TELL_AGAIN_MS) tell();
}

// Brings the address to what is shown, as an entry of the browser's history. Names of Streamlit's own stay. While a deed
// waits, its answer is not here yet.
function keepAddress(shown) {
  if (deeds.waiting.length) return;
  const said = new URLSearchParams(window.location.search);
  const wanted = new URLSearchParams(shown);
  for (const name of ["embed", "embed_options"]) for (const value of said.getAll(name)) wanted.append(name, value);
  const sorted = (address) => JSON.stringify([...address].sort());
  if (sorted(said) === sorted(wanted)) return;
  const query = String(wanted);
  // What is corrected at the first sight is no place to go back to.
  const write = deeds.session ? "pushState" : "replaceState";
  window.history[write]({}, "", `${window.location.pathname}${query ? `?${query}` : ""}`);
}

// What the server says of deeds. A new session (the server began anew) may have begun at an older address: it is told
// where the page stands.
function settle([session, page, done], address) {
  if (page === deeds.page) deeds.waiting = deeds.waiting.filter(([number]) => number > done);
  if (deeds.session && deeds.session !== session) did("address", window.location.search);
  keepAddress(address);
  deeds.session = session;
}

const GROUP = "[role=radiogroup], [role=tablist]";

// Keys for the whole page, where nobody types: space, left, right, and 1 to 9.
function keyOf(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return null;
  const target = event.composedPath()[0];
  if (target.closest?.("input:not([type=radio]), textarea, select, [contenteditable], [role=combobox], [role=slider], canvas, video")) {
    return null;
  }
  const isOnButton = target.closest?.("button, a, [role=radio], [role=row], tr, summary");
  const key = event.key === " " && !isOnButton ? "space" : event.key;
  // Arrows belong to a group of choices that was entered by keys, not to one that was merely clicked.
  const isInGroup = target.closest?.(GROUP) && !deeds.pointed;
  const isArrow = (key === "ArrowLeft" || key === "ArrowRight") && !isInGroup;
  return key === "space" || isArrow || /^[1-9]$/.test(key) ? key : null;
}

function heard(event) {
  if (event.key === "Tab") deeds.pointed = false;
  const inGroup = event.composedPath()[0].closest?.(GROUP);
  // A group of choices would take an arrow for itself: it is asked for before; all other parts of the page go first.
  if ((event.eventPhase === Event.CAPTURING_PHASE) !== Boolean(inGroup)) return;
  const key = keyOf(event);
  if (key === null) return;
  event.preventDefault();
  if (inGroup) event.stopPropagation();
  // A key that is held down waits for what it already asked for.
  if (event.repeat && deeds.waiting.length > 2) return;
  did("key", key);
}

// Once for the life of the page: whoever listened anew with each refresh would be deaf in between.
function listen() {
  deeds.listens = true;
  document.addEventListener("keydown", heard);
  document.addEventListener("keydown", heard, true);
  document.addEventListener("pointerdown", () => (deeds.pointed = true), true);
  window.addEventListener("popstate", () => did("address", window.location.search));
  document.documentElement.dataset.keys = "heard";
}

export default function ({ data, parentElement, setStateValue }) {
  const root = parentElement.querySelector(".pulse");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.pulse = { data, received: performance.now() };
  facts(root, data.facts);
  root.querySelector(".tiles").replaceChildren(...data.tiles.map(tile));
  mix(root, data.mix);
  tick(root);
  clearInterval(root.timer);
  root.timer = setInterval(() => (root.isConnected ? tick(root) : clearInterval(root.timer)), 250);
  const say = (message) => setStateValue("told", message);
  deeds.say = say;
  if (!deeds.listens) listen();
  // Not where React merely draws again what it drew before.
  if (deeds.settled !== data) settle(data.done, data.address);
  deeds.settled = data;
  return () => {
    clearInterval(root.timer);
    if (deeds.say === say) deeds.say = null;
  };
}
