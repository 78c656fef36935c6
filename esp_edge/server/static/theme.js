// Loaded before the page is painted, so that a chosen theme does not flash.
const theme = localStorage.getItem("esp_edge.theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
