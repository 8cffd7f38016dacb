// The pool of K/V pages, one cell per page, drawn on a canvas from one byte (state) and, when asked for, two bytes
// (owner) per page. Hover names a page, a click or Enter chooses it; what is lit (one bit per page) stays bright.
function bytes(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function layout(count, width, height) {
  for (let size = count < 400 ? 40 : 22; size >= 2; size -= 1) {
    const columns = Math.max(1, Math.floor(width / size));
    if (Math.ceil(count / columns) * size <= height || size === 2) {
      return { size, columns, rows: Math.ceil(count / columns), gap: size >= 9 ? 2 : size >= 4 ? 1 : 0 };
    }
  }
}

function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// Colour as the 32 bits of a picture's pixel; a dim one is laid over the page's own colour.
function pixel(colour, alpha, under) {
  const mixed = rgb(colour).map((part, at) => Math.round(part * alpha + under[at] * (1 - alpha)));
  return (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
}

function ownerOf(page, { owners }) {
  return owners ? owners[page] : 0;
}

// Colour index of each page, and the two tones of each index.
function tones({ data, owners }) {
  const under = rgb(data.colours.page);
  const colours =
    data.mode === "state" || !owners
      ? data.states.map((state) => state.colour)
      : [data.states[0].colour, ...data.owner_colours, data.rest_colour];
  return [colours.map((c) => pixel(c, 1, under)), colours.map((c) => pixel(c, 0.22, under))];
}

function paint(map) {
  const { data, states, owners, lit } = map;
  const { columns, rows } = map.grid;
  const picture = new ImageData(columns, rows);
  const pixels = new Uint32Array(picture.data.buffer);
  const [bright, dim] = tones(map);
  const byOwner = data.mode !== "state" && owners;
  const last = bright.length - 1;
  for (let page = 0; page < data.count; page += 1) {
    const tone = byOwner ? Math.min(owners[page], last) : states[page];
    const isLit = !lit || (lit[page >> 3] >> (7 - (page & 7))) & 1;
    pixels[page] = (isLit ? bright : dim)[tone];
  }
  map.picture ??= document.createElement("canvas");
  map.picture.width = columns;
  map.picture.height = rows;
  map.picture.getContext("2d").putImageData(picture, 0, 0);
}

function draw(root) {
  const map = root.map;
  const canvas = root.querySelector("canvas");
  const width = root.querySelector(".stage").clientWidth;
  if (!width) return;
  const grid = layout(map.data.count, width, map.data.height);
  if (!map.isPainted || grid.columns !== map.grid?.columns) {
    map.grid = grid;
    paint(map);
    map.isPainted = true;
  }
  map.grid = grid;
  const { size, columns, rows, gap } = grid;
  const scale = window.devicePixelRatio || 1;
  const wide = Math.round(width * scale);
  const high = Math.max(1, Math.round(rows * size * scale));
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${rows * size}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, rows * size);
  // One pixel per page, made larger without smoothing; the gaps are cut out of it. No work for single pages.
  pen.imageSmoothingEnabled = false;
  pen.drawImage(map.picture, 0, 0, columns * size, rows * size);
  for (let at = 1; gap && at <= columns; at += 1) pen.clearRect(at * size - gap, 0, gap, rows * size);
  for (let at = 1; gap && at <= rows; at += 1) pen.clearRect(0, at * size - gap, columns * size, gap);
  for (const [page, wideLine] of [[map.cursor, 1.5], [map.data.chosen, 2.5]]) {
    if (page === null || page === undefined || page >= map.data.count) continue;
    const [x, y, side] = [(page % columns) * size, Math.floor(page / columns) * size, size - gap];
    const room = Math.max(0, 7 - side) / 2;
    pen.strokeStyle = map.data.colours.page;
    pen.lineWidth = wideLine + 2;
    pen.strokeRect(x - 1 - room, y - 1 - room, side + 2 + 2 * room, side + 2 + 2 * room);
    pen.strokeStyle = map.data.colours.text;
    pen.lineWidth = wideLine;
    pen.strokeRect(x - 1 - room, y - 1 - room, side + 2 + 2 * room, side + 2 + 2 * room);
  }
  canvas.dataset.pages = map.data.count;
  canvas.dataset.columns = columns;
  canvas.dataset.size = size;
}

function words(page, map) {
  const state = map.data.states[map.states[page]]?.name ?? "unknown";
  const number = ownerOf(page, map);
  const owner = map.data.owner_labels[number - 1];
  const said = map.data.words;
  if (!map.owners || number === 0) return `${said.page} ${page} · ${state}`;
  return `${said.page} ${page} · ${state} · ${owner ?? said.unlisted}`;
}

function pageAt(event, root) {
  const box = root.querySelector("canvas").getBoundingClientRect();
  const { size, columns } = root.map.grid;
  const column = Math.floor((event.clientX - box.left) / size);
  const page = Math.floor((event.clientY - box.top) / size) * columns + column;
  return column < columns && column >= 0 && page >= 0 && page < root.map.data.count ? page : null;
}

function listen(root) {
  const canvas = root.querySelector("canvas");
  const tip = root.querySelector(".tip");
  canvas.onpointermove = (event) => {
    const page = pageAt(event, root);
    tip.hidden = page === null;
    if (page === null) return;
    tip.textContent = words(page, root.map);
    const stage = root.querySelector(".stage").getBoundingClientRect();
    const x = event.clientX - stage.left;
    tip.style.left = `${Math.max(0, Math.min(x + 12, stage.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - stage.top + 16}px`;
  };
  canvas.onpointerleave = () => {
    tip.hidden = true;
  };
  const choose = (page) => {
    if (page === null) return;
    // Framed at once; the page's owner and what stays bright come with the answer.
    root.map.data.chosen = page;
    draw(root);
    root.trigger("page", page);
  };
  canvas.onclick = (event) => choose(pageAt(event, root));
  canvas.onkeydown = (event) => {
    const { columns } = root.map.grid;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) {
      event.preventDefault();
      event.stopPropagation();
      const from = root.map.cursor ?? root.map.data.chosen ?? (step > 0 ? -step : 0);
      root.map.cursor = Math.min(root.map.data.count - 1, Math.max(0, from + step));
      draw(root);
      root.querySelector("figcaption").textContent = words(root.map.cursor, root.map);
    } else if (event.key === "Enter" && root.map.cursor !== null) choose(root.map.cursor);
  };
}

function legend(root, items) {
  root.querySelector(".key").replaceChildren(
    ...items.map(([colour, label, amount]) => {
      const item = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = colour;
      const number = document.createElement("b");
      number.textContent = amount;
      item.append(dot, document.createTextNode(`${label} `), number);
      return item;
    }),
  );
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".map");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.trigger = setTriggerValue;
  root.map = {
    data,
    states: bytes(data.states_b64),
    owners: data.owners_b64 ? new Uint16Array(bytes(data.owners_b64).buffer) : null,
    lit: data.lit_b64 ? bytes(data.lit_b64) : null,
    cursor: root.map?.cursor ?? null,
    picture: root.map?.picture,
    isPainted: false,
    grid: null,
  };
  legend(root, data.legend);
  root.querySelector("canvas").ariaLabel = data.summary;
  // Where the keys have gone to stays said over refreshes; the same words again would be read out again.
  const { cursor } = root.map;
  const caption = cursor === null || cursor >= data.count ? data.hint : words(cursor, root.map);
  const figcaption = root.querySelector("figcaption");
  if (figcaption.textContent !== caption) figcaption.textContent = caption;
  draw(root);
  listen(root);
  if (!root.watcher) {
    root.watcher = new ResizeObserver(() => draw(root));
    root.watcher.observe(root.querySelector(".stage"));
  }
  return () => {
    root.watcher?.disconnect();
    root.watcher = null;
  };
}
