"use strict";
const Theme = (() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const changed = () => listeners.forEach((listener) => listener());
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem("coulomb-theme", root.dataset.theme); } catch (error) { /* forbidden */ }
    changed();
  });
  dark.addEventListener("change", () => { if (!root.dataset.theme) changed(); });

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (!link || !entry.isIntersecting) continue;
      links.forEach((other) => other.removeAttribute("aria-current"));
      link.setAttribute("aria-current", "true");
      const list = link.closest("ul");
      list.scrollLeft = link.offsetLeft - list.offsetLeft - list.clientWidth / 2 + link.clientWidth / 2;
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => seen.observe(section));
  return { colour, onChange: (listener) => listeners.push(listener) };
})();
