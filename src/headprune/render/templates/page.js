"use strict";
for (const figure of document.querySelectorAll(".map")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector(".heads");
  const cells = [...svg.querySelectorAll("rect")];
  const told = figure.querySelector(".told");
  const rows = data.paths.map((_, y) => data.cells.flatMap((cell, i) => (cell[0] === y ? [i] : [])));
  let now = -1;

  const tell = (index) => {
    const [layer, head, state, facts] = data.cells[index];
    const known = facts.map((fact, i) => (fact === null ? null : `${data.names[i]} ${fact}`));
    return [`${data.paths[layer]}, head ${head}: ${data.states[state]}`, ...known]
      .filter(Boolean).join("; ");
  };
  const show = (index) => {
    if (index < 0) return;
    if (now >= 0) cells[now].classList.remove("now");
    now = index;
    cells[now].classList.add("now");
    told.textContent = tell(now);
  };
  const at = (event) => cells.indexOf(event.target);
  svg.addEventListener("pointerover", (event) => show(at(event)));
  svg.addEventListener("click", (event) => show(at(event)));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[event.key];
    if (!move && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const filled = rows.filter((row) => row.length);
    const y = now < 0 ? 0 : filled.findIndex((row) => row.includes(now));
    const x = now < 0 ? 0 : filled[y].indexOf(now);
    if (now < 0 || !move) {
      const row = filled[y];
      show(event.key === "End" ? row[row.length - 1] : row[0]);
      return;
    }
    const row = filled[Math.min(Math.max(y + move[0], 0), filled.length - 1)];
    show(row[Math.min(Math.max(x + move[1], 0), row.length - 1)]);
  });
}
// on paper nothing can be opened: facts are, and closed again
const facts = [...document.querySelectorAll("details:not([open]):has(.facts)")];
addEventListener("beforeprint", () => facts.forEach((details) => { details.open = true; }));
addEventListener("afterprint", () => facts.forEach((details) => { details.open = false; }));
