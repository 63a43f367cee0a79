"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEAST = 0.05; // fainter lines only blur the others
const LONGEST = 16; // letters of a token

const heads = new Map();
for (const layer of data.layers) {
  const bytes = Uint8Array.from(atob(layer.weights), (sign) => sign.charCodeAt(0));
  const numbers = new DataView(bytes.buffer);
  const size = layer.queries.length * layer.keys.length;
  layer.heads.forEach((head, place) => heads.set(`${layer.name}.${head}`, {
    layer,
    weight: (query, key) =>
      numbers.getUint16(2 * (place * size + query * layer.keys.length + key), true) / data.full,
  }));
}

const make = (name, attributes, ...children) => {
  const svg = ["svg", "text", "line", "rect", "image", "g"].includes(name);
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const short = (token) => (token.length > LONGEST ? `${token.slice(0, LONGEST - 1)}…` : token);
const shares = ({ layer, weight }, query) => layer.keys
  .map((token, key) => [weight(query, key), token, key])
  .sort((a, b) => b[0] - a[0]);
const tell = (head, query) => {
  const most = shares(head, query).filter(([share]) => share >= LEAST).slice(0, 5);
  const told = most.map(([share, token]) => `“${token}” ${share.toFixed(2)}`);
  return `“${head.layer.queries[query]}” gives ${told.join(", ") || "no token 0.05 or more"}`;
};

// two columns of tokens, and a line for every weight
const lines = (name, head) => {
  const { queries, keys } = head.layer;
  const step = 19;
  const height = Math.max(queries.length, keys.length) * step + 6;
  const y = (place) => place * step + step / 2 + 3;
  const svg = make("svg", {
    class: "view lines", viewBox: `0 0 440 ${height}`, tabindex: "0", role: "application",
    "aria-roledescription": "head view",
    "aria-label": `Head ${name}: up and down pick a token that looks; Escape shows all.`,
  });
  queries.forEach((_, query) => keys.forEach((_, key) => {
    const share = head.weight(query, key);
    if (share < LEAST) return;
    svg.append(make("line", {
      x1: 146, y1: y(query), x2: 294, y2: y(key), "stroke-opacity": share.toFixed(3), "data-query": query,
    }));
  }));
  queries.forEach((token, query) => svg.append(
    make("text", { class: "end", x: 140, y: y(query) + 4, "data-query": query }, short(token))));
  keys.forEach((token, key) => svg.append(make("text", { x: 300, y: y(key) + 4 }, short(token))));
  return svg;
};

// a cell for every weight
const map = (name, head) => {
  const { queries, keys } = head.layer;
  const step = 15, left = 110, top = 110;
  const [width, height] = [keys.length * step, queries.length * step];
  const image = document.querySelector(`[data-head="${name}"] img`).getAttribute("src");
  const svg = make("svg", {
    class: "view map", viewBox: `0 0 ${left + width + 8} ${top + height + 4}`, role: "img",
    "aria-label": `Map of head ${name}; the table below has its numbers.`,
    style: `max-width:${Math.round(1.3 * (left + width + 8))}px`,
  });
  svg.append(
    make("image", { href: image, x: left, y: top, width, height, preserveAspectRatio: "none" }),
    make("rect", { class: "frame", x: left, y: top, width, height }),
  );
  queries.forEach((token, query) => svg.append(
    make("text", { class: "end", x: left - 5, y: top + query * step + 11.5 }, short(token))));
  keys.forEach((token, key) => svg.append(make("text", {
    transform: `translate(${left + key * step + 11.5} ${top - 5}) rotate(-90)`,
  }, short(token))));
  return svg;
};

const table = (name, head) => {
  const { queries, keys } = head.layer;
  const columns = keys.map((token) => make("th", { scope: "col" }, token));
  const rows = queries.map((token, query) => make("tr", {},
    make("th", { scope: "row" }, token),
    ...keys.map((_, key) => make("td", {}, head.weight(query, key).toFixed(2)))));
  const whole = make("table", { class: "weights" },
    make("caption", { class: "hidden" }, `Weights of head ${name}; a row is a token that looks`),
    make("thead", {}, make("tr", {}, make("td", {}), ...columns)), make("tbody", {}, ...rows));
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": `Weights of head ${name}` };
  return make("details", {}, make("summary", {}, "Weights as a table"), make("div", region, whole));
};

const panel = (name) => {
  const head = heads.get(name);
  const away = make("button", { type: "button", "aria-label": `Close head ${name}` }, "Close");
  away.addEventListener("click", () => toggle(name));
  const drawn = lines(name, head);
  const told = make("p", { class: "told", role: "status" },
    "Point at a token on the left, or press up and down, to read what it looks at.");
  const figure = make("figure", { class: "card head", "data-shown": name },
    make("h3", {}, `Head ${name}`, make("small", {}, head.layer.path), away),
    drawn, told, map(name, head), table(name, head));
  let now = -1;
  const pick = (query) => {
    now = query;
    drawn.classList.toggle("picked", now >= 0);
    const seen = new Set(now < 0 ? [] : [String(now)]);
    for (const one of drawn.querySelectorAll("[data-query]")) {
      one.classList.toggle("now", seen.has(one.dataset.query));
    }
    if (now >= 0) told.textContent = tell(head, now);
  };
  drawn.addEventListener("pointerover", (event) => {
    if (event.target.matches("text[data-query]")) pick(Number(event.target.dataset.query));
  });
  drawn.addEventListener("pointerleave", () => pick(-1));
  drawn.addEventListener("keydown", (event) => {
    const last = head.layer.queries.length - 1;
    const moves = { ArrowDown: Math.min(now + 1, last), ArrowUp: Math.max(now - 1, 0), Home: 0, End: last, Escape: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    pick(moves[event.key]);
  });
  return figure;
};

const shown = document.querySelector(".heads-shown");
const buttons = [...document.querySelectorAll(".maps button")];
const toggle = (name) => {
  const button = buttons.find((one) => one.dataset.head === name);
  const there = [...shown.children].find((one) => one.dataset.shown === name);
  button.setAttribute("aria-pressed", String(!there));
  if (there) {
    if (there.contains(document.activeElement)) button.focus();
    there.remove();
  } else shown.prepend(panel(name));
};
for (const name of [...data.shown].reverse()) toggle(name);

// one map is in the order of the tab key; arrows move from it
for (const grid of document.querySelectorAll(".maps")) {
  const own = buttons.filter((one) => grid.contains(one));
  const cell = (one) => [one.closest("tr").rowIndex, one.parentElement.cellIndex];
  own[0].tabIndex = 0;
  const enter = (one) => {
    for (const other of own) other.tabIndex = other === one ? 0 : -1;
    one.focus();
  };
  for (const button of own) {
    button.addEventListener("click", () => toggle(button.dataset.head));
    button.addEventListener("keydown", (event) => {
      const [row, column] = cell(button);
      const along = {
        ArrowRight: (r, c) => r === row && c > column, ArrowLeft: (r, c) => r === row && c < column,
        ArrowDown: (r, c) => r > row && c === column, ArrowUp: (r, c) => r < row && c === column,
      }[event.key];
      if (!along) return;
      event.preventDefault();
      const there = own.filter((one) => along(...cell(one)));
      const next = ["ArrowLeft", "ArrowUp"].includes(event.key) ? there[there.length - 1] : there[0];
      if (next) enter(next);
    });
  }
}
