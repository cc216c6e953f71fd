(() => {
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const wanted = localStorage.getItem("coulomb-theme");
    if (wanted === "light" || wanted === "dark") root.dataset.theme = wanted;
  } catch (error) { /* storage may be forbidden */ }
})();
