package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// imageList lists the project's images, or, without a project, the silo's (A44).
func (s *Server) imageList(r *request) (int, any, error) {
	if r.query.Get("project") != "" {
		return listInProject(s, r, store.Images)
	}
	return list(s, r, store.Images, func(*store.Tx) (string, error) { return "", nil })
}

func (s *Server) imageView(r *request) (int, any, error) {
	var img store.Image
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		img, err = lookup(s, r, tx, store.Images, r.path.Get("image"))
		return err
	})
	return http.StatusOK, img, err
}
