package console

import (
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// tokenHeader carries the token of a request that has no form.
const tokenHeader = "X-Console-Token"

// Guard refuses what a page of another origin can send to the admin listener: a browser on the
// same machine reaches the listener, and the page's name may resolve to its address (DNS
// rebinding). A name in Host is therefore refused unless it is localhost or one of Hosts, an Origin
// must be the listener's own, and a change needs the token of the console's pages if a browser asks
// for it. Other clients, such as curl, send no Origin and need no token.
func (c *Console) Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		if err := c.check(r); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// maxForm limits the body of a request to the admin listener.
const maxForm = 1 << 20

func (c *Console) check(r *http.Request) error {
	if !c.ownHost(r.Host) {
		return fmt.Errorf("the request's Host is %q, and any name can be made to resolve to this "+
			"address: use localhost or the IP address of the admin listener, or start the simulator with "+
			"--admin-host and the name", r.Host)
	}
	scheme := "http://"
	if r.TLS != nil {
		scheme = "https://"
	}
	origin, site := r.Header.Values("Origin"), r.Header.Get("Sec-Fetch-Site")
	for _, o := range origin {
		if !strings.EqualFold(o, scheme+r.Host) {
			return fmt.Errorf("the request comes from a page of %q, expected one of %s%s", o, scheme,
				r.Host)
		}
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return nil
	}
	ours := r.URL.Path == actionPath
	if len(origin) == 0 && site == "" && !ours {
		return nil // no browser
	}
	token := r.Header.Get(tokenHeader)
	if token == "" && ours {
		token = r.PostFormValue("token")
	}
	if subtle.ConstantTimeCompare([]byte(token), []byte(c.Token)) != 1 {
		return fmt.Errorf("the request lacks the token of the console's pages: load the page again, " +
			"because the token is a new one each time that the simulator starts")
	}
	return nil
}

// ownHost reports whether a Host is an IP address, localhost or one of Hosts, with or without a
// port.
func (c *Console) ownHost(host string) bool {
	name := host
	if bare, _, err := net.SplitHostPort(host); err == nil {
		name = bare
	}
	if slices.ContainsFunc(append([]string{"localhost"}, c.Hosts...), func(own string) bool {
		return strings.EqualFold(own, name)
	}) {
		return true
	}
	_, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]"))
	return err == nil
}
